"""Warm-up, repeats, median and quartiles: the only place with a clock for kernels."""

from __future__ import annotations

import logging
import os
import platform
import statistics
import time
from collections.abc import Callable

import torch

log = logging.getLogger(__name__)

Call = Callable[[], object]


def measure(fn: Call, *, warmup: int = 3, repeats: int = 10) -> tuple[float, float, float]:
    """Milliseconds of fn(): (median, lower quartile, upper quartile).

    Args:
        fn: What is timed; where there is CUDA, between two events on the current stream.
        warmup: Calls before that are not counted.
        repeats: Calls that are, at least 1.
    """
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


def measure_within(
    fn: Call, *, budget_ms: float, most: int = 10, called: bool = False
) -> tuple[float, float, float]:
    """As measure, with the repeats, one to `most`, that fit into budget_ms.

    Args:
        fn: What is timed.
        budget_ms: Milliseconds that the counted calls may take.
        most: Repeats at most.
        called: fn was called before, so that nothing is left to be compiled.
    """
    if not called:
        fn()
    once = measure(fn, warmup=0, repeats=1)
    repeats = min(most, int(budget_ms / once[0]))
    return measure(fn, warmup=min(repeats, 3), repeats=repeats) if repeats > 1 else once


def gpu_time(fn: Call, *, budget_ms: float, most: int = 10) -> tuple[float, str]:
    """Milliseconds of fn() without the gaps between its launches, and how that was timed.

    Args:
        fn: What is timed.
        budget_ms: Milliseconds that the counted calls may take.
        most: Repeats at most.

    Returns:
        (median, "graph"): fn as a CUDA graph, several calls in one where a call is short.
        (median, "launches"): calls back to back from Python, since fn cannot be captured here.
    """
    fn()
    once = measure(fn, warmup=0, repeats=1)[0]
    calls = max(min(10, int(20 / once)), 1)

    def several() -> None:
        for _ in range(calls):
            fn()

    replay: Call = several
    how = "launches"
    if torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                several()
            replay, how = graph.replay, "graph"
        except RuntimeError as error:
            torch.cuda.synchronize()
            log.warning("no CUDA graph: %s", str(error).splitlines()[0][:90])
    return measure_within(replay, budget_ms=budget_ms, most=most)[0] / calls, how


def peak_mib(fn: Call) -> float:
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


def machine() -> dict[str, str]:
    """The GPU (or the CPU), the versions and the date, for each row of results."""
    try:
        import triton

        triton_version = str(triton.__version__)
    except ModuleNotFoundError:  # a CPU build of torch brings none
        triton_version = ""
    cpu = f"{platform.machine()}, {os.cpu_count()} cores"
    return {
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else cpu,
        "torch": str(torch.__version__),
        "triton": triton_version,
        "date": time.strftime("%Y-%m-%d"),
    }
