"""What the demo shows while it works: progress bars on stderr (by rich if installed) and text."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from typing import TextIO

Advance = Callable[[], None]


@contextlib.contextmanager
def step(title: str, total: int | None = None) -> Iterator[Advance]:
    """Show a step that takes seconds, for as long as the block runs.

    Args:
        title: What is being done, such as "loading the model".
        total: How often the block will call what it gets; None where that is not known.

    Yields:
        A function that moves the bar by one.
    """
    # taken now, so that the block may redirect stderr
    stream = sys.stderr
    if not stream.isatty():
        shown = _lines(stream, title)
    elif importlib.util.find_spec("rich") is not None:
        shown = _rich_bar(stream, title, total)
    else:
        shown = _plain_bar(stream, title, total)
    with shown as advance:
        yield advance


@contextlib.contextmanager
def _lines(stream: TextIO, title: str) -> Iterator[Advance]:
    """One line at the end: the stream is a file or a pipe."""
    start = time.perf_counter()
    yield lambda: None
    stream.write(f"{title}: {time.perf_counter() - start:.1f} s\n")
    stream.flush()


@contextlib.contextmanager
def _rich_bar(stream: TextIO, title: str, total: int | None) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:32}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=stream)) as progress:
        task = progress.add_task(title, total=total)
        yield lambda: progress.advance(task)
        progress.update(task, total=1, completed=1)


@contextlib.contextmanager
def _plain_bar(stream: TextIO, title: str, total: int | None) -> Iterator[Advance]:
    """A bar of one line, redrawn in place; empty until the end where the total is not known."""
    start, done, width = time.perf_counter(), 0, 30

    def draw(filled: int) -> None:
        bar = "#" * filled + "." * (width - filled)
        stream.write(f"\r{title:32} [{bar}] {time.perf_counter() - start:5.1f} s")
        stream.flush()

    def advance() -> None:
        nonlocal done
        done += 1
        draw(min(width, done * width // total) if total else 0)

    draw(0)
    try:
        yield advance
        draw(width)
    finally:
        stream.write("\n")


def write(text: str) -> None:
    """Write text and a line break to stdout."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
