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
