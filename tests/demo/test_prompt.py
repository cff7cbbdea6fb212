"""The prompt has the length asked for, and the pass key stands where it should."""

import pytest

from crisp_flex.demo.errors import DemoError
from crisp_flex.demo.prompt import NEEDLE, PASS_KEY, QUESTION, passkey_prompt, text_ids


class Characters:
    """A tokenizer with one token a character."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(character) for character in text]


def text_of(ids: list[int]) -> str:
    return "".join(map(chr, ids))


@pytest.mark.parametrize("kind", ["code", "prose"])
@pytest.mark.parametrize("length", [1, 1000, 300_000])
def test_text_is_exactly_as_long_as_asked_for(kind, length):
    assert len(text_ids(Characters(), kind, length)) == length


def test_code_is_source_and_prose_is_not():
    code = text_of(text_ids(Characters(), "code", 50_000))
    prose = text_of(text_ids(Characters(), "prose", 50_000))
    assert code.count("\nimport ") > 3
    assert code.count("return ") > 10 * prose.count("\n    return ")


def test_text_is_the_same_every_time():
    assert text_ids(Characters(), "prose", 5000) == text_ids(Characters(), "prose", 5000)


def test_more_text_than_there_is_says_so():
    with pytest.raises(DemoError, match="smaller --length"):
        text_ids(Characters(), "prose", 10**9)


@pytest.mark.parametrize("depth", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("length", [512, 4096, 4097])
def test_pass_key_stands_at_its_depth(length, depth):
    prompt = passkey_prompt(Characters(), length, depth=depth)
    text = text_of(prompt.ids)
    start, stop = prompt.needle
    assert len(prompt.ids) == length
    assert text[start:stop] == NEEDLE
    assert text.endswith(QUESTION)
    assert start == round(depth * (length - len(NEEDLE) - len(QUESTION)))


def test_pass_key_is_nowhere_else():
    text = text_of(passkey_prompt(Characters(), 100_000).ids)
    assert text.count(PASS_KEY) == NEEDLE.count(PASS_KEY)


def test_a_prompt_without_room_for_text_is_refused():
    with pytest.raises(DemoError, match="too short"):
        passkey_prompt(Characters(), len(NEEDLE) + len(QUESTION))


@pytest.mark.parametrize("depth", [-0.1, 1.1])
def test_a_depth_outside_the_text_is_refused(depth):
    with pytest.raises(DemoError, match="between 0 and 1"):
        passkey_prompt(Characters(), 4096, depth=depth)
