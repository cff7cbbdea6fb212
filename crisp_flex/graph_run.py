"""Which compiled graph runs in this thread: set around each run while something is recorded.

A route call knows the number of its site in its graph; the graph's run knows the sites' names, and
is what joins the calls of one site (head groups) and keeps threads and models apart.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from crisp_flex.report import RewriteReport, SiteReport
from crisp_flex.routing.ops import watched

_numbers = itertools.count()
_local = threading.local()


@dataclass(frozen=True, slots=True, eq=False)
class GraphRun:
    """One run of one graph.

    Args:
        number: Different for each run in this process, ascending.
        owner: What compiled the graph: a CrispFlexBackend, or None for a plain function.
        sites: The graph's attention calls, by their number.
    """

    number: int
    owner: object
    sites: tuple[SiteReport, ...]


def current() -> GraphRun | None:
    """The innermost run in this thread, None outside."""
    runs: list[GraphRun] = getattr(_local, "runs", [])
    return runs[-1] if runs else None


@contextlib.contextmanager
def run_of(owner: object, sites: tuple[SiteReport, ...]) -> Iterator[None]:
    """While active, `current()` is a new run in this thread."""
    if not hasattr(_local, "runs"):
        _local.runs = []
    _local.runs.append(GraphRun(next(_numbers), owner, sites))
    try:
        yield
    finally:
        _local.runs.pop()


def tracked(
    compiled: Callable[..., Any], owner: object, report: RewriteReport
) -> Callable[..., Any]:
    """A compiled graph that says when it runs, where it has a rewritten call and is watched."""
    if not report.rewritten:
        return compiled
    sites = tuple(report.sites)

    @functools.wraps(compiled)
    def run(*args: Any) -> Any:  # noqa: ANN401
        if not watched():
            return compiled(*args)
        with run_of(owner, sites):
            return compiled(*args)

    return run
