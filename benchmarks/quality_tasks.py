"""Retrieval tasks in the manner of RULER (arXiv 2404.06654), with own words and plain questions.

single       one key with a value                      multikey    the value of one of four keys
multivalue   the four values of one key                variables   names that a chain gives a value
words        the words that a list repeats most        (the depth does not matter there)
"""

import math
import random
from dataclasses import dataclass

from quality_texts import windows

TASKS = ("single", "multikey", "multivalue", "variables", "words")
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
KEYS = (
    "copper lantern", "quiet harbour", "velvet maple", "winter orchard", "silver anchor",
    "paper comet", "amber valley", "marble otter", "hollow cedar", "crimson kettle",
)  # fmt: skip
WORDS = (
    "apple", "river", "stone", "cloud", "tiger", "window", "garden", "silver", "bridge",
    "music", "winter", "candle", "forest", "button", "castle", "dragon", "engine", "feather",
    "guitar", "hammer", "island", "jacket", "kitten", "ladder", "magnet", "needle", "orange",
    "pencil", "rabbit", "saddle", "ticket", "umbrella", "village", "whistle", "yellow", "zebra",
    "anchor", "basket",
)  # fmt: skip
COMMON, RARE, VALUES = 5, 3, 4


@dataclass(frozen=True)
class Sample:
    """A prompt's token ids, the strings that its answer must hold, and tokens to generate."""

    ids: list[int]
    answers: tuple[str, ...]
    new_tokens: int


def sample(task, tokenizer, length, *, depth, seed):
    """The sample of one task, the same for the same arguments; its prompt has `length` tokens.

    Args:
        task: A name of TASKS.
        tokenizer: Of the model.
        length: Tokens, at least 512.
        depth: Place of the fact that is asked for, in [0, 1]; "words" has none.
        seed: Of keys, values and the places of the other facts.
    """
    # not hash(): it differs between processes
    rng = random.Random(f"{task} {length} {depth} {seed}")
    if task == "words":
        return _words(tokenizer, length, rng)
    places = [depth, *(rng.random() for _ in range(VALUES - 1))]
    values = [str(n) for n in rng.sample(range(10000, 99999), VALUES)]
    if task == "single":
        key = rng.choice(KEYS)
        facts, answers = [f"The access code of the {key} is {values[0]}."], values[:1]
        ask = _ask(key)
    elif task == "multikey":
        keys = rng.sample(KEYS, VALUES)
        facts = [f"The access code of the {k} is {v}." for k, v in zip(keys, values, strict=True)]
        answers, ask = values[:1], _ask(keys[0])
    elif task == "multivalue":
        key = rng.choice(KEYS)
        facts = [f"One access code of the {key} is {v}." for v in values]
        answers = values
        ask = f"What are all {VALUES} access codes of the {key}? They are"
    elif task == "variables":
        names = ["".join(rng.sample("ABCDEFGHJKLMNPQRSTUVWXYZ", 5)) for _ in range(VALUES)]
        sources = [values[0], *names[:-1]]
        facts = [f"VAR {n} = {s}" for n, s in zip(names, sources, strict=True)]
        places = [depth + i * (1 - depth) / VALUES for i in range(VALUES)]
        answers = names
        ask = f"Which {VALUES} variables have the value {values[0]}? They are VAR"
    else:
        raise ValueError(f"no task {task!r}; choose from {TASKS}")
    ids = _hide(tokenizer, length, list(zip(places, facts, strict=False)), ask, rng)
    return Sample(ids, tuple(answers), 12 if len(answers) == 1 else 48)


def _ask(key):
    return f"What is the access code of the {key}? The access code of the {key} is"


def _encode(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def _hide(tokenizer, length, placed, ask, rng):
    facts = [(place, _encode(tokenizer, f"\n\n{fact}\n\n")) for place, fact in sorted(placed)]
    question = _encode(tokenizer, f"\n\n{ask}")
    room = length - len(question) - sum(len(ids) for _, ids in facts)
    if room < length // 4:
        raise ValueError(f"{length} tokens are too few for the facts of a task; take 512 or more")
    choices = windows(tokenizer, "prose", room, 2)
    filler = rng.choice(choices)
    ids, at = [], 0
    for place, fact in facts:
        to = round(place * room)
        ids += filler[at:to] + fact
        at = to
    return ids + filler[at:] + question


def _words(tokenizer, length, rng):
    words = rng.sample(WORDS, len(WORDS))
    common, rare = words[:COMMON], words[COMMON:]
    ask = f"\n\nThe {COMMON} words that the list above repeats most often are:"
    question = _encode(tokenizer, ask)

    def text(rounds):
        # ten times a common word for each of a rare one, as RULER's 30 to 3
        deck = common * (10 * rounds) + rare * rounds
        rng_of = random.Random(rounds)
        rng_of.shuffle(deck)
        return _encode(tokenizer, "List: " + " ".join(deck))

    rounds = 1
    while len(text(rounds)) < length - len(question):
        rounds *= 2
    return Sample(text(rounds)[: length - len(question)] + question, tuple(common), 32)


def score(reply, answers):
    """Share of `answers` that stand in `reply`, as RULER scores; one answer: 0 or 1."""
    return sum(answer.lower() in reply.lower() for answer in answers) / len(answers)


def wilson(mean, n, *, z=1.96):
    """The 95 % interval (low, high) of a share `mean` of n trials, Wilson's.

    Of partial scores it is too wide, never too narrow: their variance is at most a coin's.
    """
    middle = (mean + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(middle - half, 0.0), min(middle + half, 1.0)
