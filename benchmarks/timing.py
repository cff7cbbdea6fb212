"""The package's clocks, and where a row came from: machine, versions and commit."""

import contextlib
import json
import statistics
import subprocess
from pathlib import Path

from crisp_flex.bench.timing import gpu_time, machine, measure, measure_within, peak_mib

__all__ = [
    "gpu_time", "in_turns", "measure", "measure_within", "medians", "peak_mib", "where",
    "write_rows",
]  # fmt: skip


def where():
    """Machine, versions and commit, for each row of results."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {**machine(), "commit": commit}


def in_turns(calls, *, rounds, repeats, within=None):
    """{name: milliseconds of each round}; in a round every call has its turn, after one warm-up.

    within: {name: a function that makes the context of the call's turn}, where it has one.
    """
    times, within = {name: [] for name in calls}, within or {}
    for _ in range(rounds):
        for name, call in calls.items():
            with within.get(name, contextlib.nullcontext)():
                times[name].append(measure(call, warmup=1, repeats=repeats)[0])
    return times


def medians(times):
    """{name: the median} of what in_turns returns."""
    return {name: statistics.median(found) for name, found in times.items()}


def write_rows(rows, path):
    """Append rows as JSON lines."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
