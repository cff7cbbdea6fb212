"""Warm-up, repeats, median and quartiles, and where it ran: the only place with a clock."""

import json
import os
import platform
import statistics
import subprocess
import time
from pathlib import Path

import torch


def measure(fn, *, warmup=3, repeats=10):
    """Milliseconds of fn(): (median, lower quartile, upper quartile)."""
    for _ in range(warmup):
        fn()
    times = []
    for _ in range(repeats):
        if torch.cuda.is_available():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            fn()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        else:
            begin = time.perf_counter()
            fn()
            times.append((time.perf_counter() - begin) * 1e3)
    if len(times) < 2:
        return times[0], times[0], times[0]
    low, middle, high = statistics.quantiles(times, n=4)
    return middle, low, high


def measure_within(fn, *, budget_ms, most=10, called=False):
    """As measure, with the repeats, one to `most`, that fit into budget_ms.

    called: fn was called before, so that nothing is left to be compiled.
    """
    if not called:
        fn()
    once = measure(fn, warmup=0, repeats=1)
    repeats = min(most, int(budget_ms / once[0]))
    return measure(fn, warmup=min(repeats, 3), repeats=repeats) if repeats > 1 else once


def gpu_time(fn, *, budget_ms, most=10):
    """Milliseconds of fn() without the gaps between its launches, and how that was timed.

    Returns:
        (median, "graph"): fn as a CUDA graph, several calls in one where a call is short.
        (median, "launches"): calls back to back from Python, since fn cannot be captured here.
    """
    fn()
    once = measure(fn, warmup=0, repeats=1)[0]
    calls = max(min(10, int(20 / once)), 1)

    def several():
        for _ in range(calls):
            fn()

    replay, how = several, "launches"
    if torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                several()
            replay, how = graph.replay, "graph"
        except RuntimeError as error:
            torch.cuda.synchronize()
            print(f"  no CUDA graph: {str(error).splitlines()[0][:90]}")
    return measure_within(replay, budget_ms=budget_ms, most=most)[0] / calls, how


def peak_mib(fn):
    """MiB that fn() allocates at most at a time, its result included; 0 without CUDA."""
    if not torch.cuda.is_available():
        fn()
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fn()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def where():
    """Machine, versions and commit, for each row of results."""
    try:
        import triton

        triton_version = triton.__version__
    except ModuleNotFoundError:  # a CPU build of torch brings none
        triton_version = ""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    cpu = f"{platform.machine()}, {os.cpu_count()} cores"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu
    return {
        "machine": gpu,
        "torch": torch.__version__,
        "triton": triton_version,
        "commit": commit,
        "date": time.strftime("%Y-%m-%d"),
    }


def write_rows(rows, path):
    """Append rows as JSON lines."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
