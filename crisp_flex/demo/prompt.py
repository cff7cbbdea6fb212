"""The demo's text: prose and code of Python's standard library, with a pass key hidden in it."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from crisp_flex.demo.errors import DemoError

# Chapters of the language reference that do not contain each other, longest useful ones first.
TOPICS = (
    "compound", "specialnames", "types", "execmodel", "strings", "string-methods",
    "formatstrings", "typesseq", "typesmapping", "debugger", "assignment", "comparisons",
    "import", "calls", "naming", "numeric-types",
)  # fmt: skip
MODULES = (
    "statistics", "heapq", "textwrap", "difflib", "argparse", "configparser", "tarfile",
    "inspect", "doctest", "threading", "shutil", "ipaddress", "pickle", "ast", "enum",
    "subprocess", "typing", "random", "fractions", "calendar", "dataclasses", "tokenize",
    "functools", "mailbox", "optparse", "pickletools", "_pydecimal", "_pyio", "turtle", "pdb",
    "imaplib", "smtplib", "ssl", "traceback", "platform", "socket", "codecs", "ftplib", "bdb",
    "tempfile", "pstats", "trace", "dis", "plistlib",
)  # fmt: skip

PASS_KEY = "71432"
NEEDLE = f"\n\nThe pass key is {PASS_KEY}. Remember it. {PASS_KEY} is the pass key.\n\n"
QUESTION = "\n\nWhat is the pass key? The pass key is"

Kind = Literal["code", "prose"]


class Tokenizer(Protocol):
    """What the prompt needs of a tokenizer: text to token ids, without special tokens."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt with a pass key in it.

    Args:
        ids: Token ids, exactly as many as asked for.
        needle: Positions [start, stop) of the sentence with the pass key, in tokens.
        answer: The pass key, as text.
    """

    ids: list[int]
    needle: tuple[int, int]
    answer: str


def _sources() -> Iterator[str]:
    """The source text of MODULES, those that this Python has."""
    folder = Path(sysconfig.get_path("stdlib"))
    for name in MODULES:
        file = folder / f"{name}.py"
        if file.is_file():
            yield file.read_text(encoding="utf-8")


def _docstrings(source: str) -> Iterator[str]:
    """The docstrings of a module, its classes and functions, in the order of the source."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            doc = ast.get_docstring(node)
            if doc:
                yield doc


def _pieces(kind: Kind) -> Iterator[str]:
    """Text of one kind, one file or chapter at a time."""
    if kind == "code":
        yield from _sources()
        return
    from pydoc_data.topics import topics

    yield from (topics[name] for name in TOPICS if name in topics)
    for source in _sources():
        yield "\n\n".join(_docstrings(source))


def text_ids(tokenizer: Tokenizer, kind: Kind, length: int) -> list[int]:
    """The first `length` tokens of the standard library's prose or code.

    Args:
        tokenizer: Turns text into token ids.
        kind: "prose" is the language reference, then docstrings; "code" is module sources.
        length: Tokens, at least 1.

    Returns:
        Exactly `length` token ids, the same for the same tokenizer and Python version.

    Raises:
        DemoError: This Python has less text than that.
    """
    ids: list[int] = []
    for piece in _pieces(kind):
        ids += tokenizer.encode(piece.strip() + "\n\n", add_special_tokens=False)
        if len(ids) >= length:
            return ids[:length]
    raise DemoError(
        f"The standard library has {len(ids)} tokens of {kind} here, and {length} are needed: "
        "choose a smaller --length."
    )


def passkey_prompt(
    tokenizer: Tokenizer, length: int, *, depth: float = 0.5, kind: Kind = "code"
) -> Prompt:
    """A prompt of exactly `length` tokens: real text, a pass key in it, the question at its end.

    Args:
        tokenizer: Turns text into token ids.
        length: Tokens of the whole prompt.
        depth: Where the pass key stands: 0 at the start of the text, 1 right before the question.
        kind: The text around it, as for text_ids.

    Raises:
        DemoError: The length leaves no room for text, or depth is outside [0, 1].
    """
    if not 0.0 <= depth <= 1.0:
        raise DemoError(f"--depth is {depth}; it must lie between 0 and 1.")
    needle = tokenizer.encode(NEEDLE, add_special_tokens=False)
    question = tokenizer.encode(QUESTION, add_special_tokens=False)
    room = length - len(needle) - len(question)
    if room < len(needle) + len(question):
        raise DemoError(
            f"--length is {length}, too short: the pass key and its question take "
            f"{len(needle) + len(question)} tokens and need at least as many around them."
        )
    filler = text_ids(tokenizer, kind, room)
    start = round(depth * room)
    return Prompt(
        ids=filler[:start] + needle + filler[start:] + question,
        needle=(start, start + len(needle)),
        answer=PASS_KEY,
    )
