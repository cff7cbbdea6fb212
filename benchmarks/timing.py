"""The package's clocks, and where a row came from: machine, versions and commit."""

import json
import subprocess
from pathlib import Path

from crisp_flex.bench.timing import gpu_time, machine, measure, measure_within, peak_mib

__all__ = ["gpu_time", "measure", "measure_within", "peak_mib", "where", "write_rows"]


def where():
    """Machine, versions and commit, for each row of results."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {**machine(), "commit": commit}


def write_rows(rows, path):
    """Append rows as JSON lines."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
