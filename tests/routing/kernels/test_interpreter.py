"""Runs interpreted*.py, each in a process that sets TRITON_INTERPRET before triton loads."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

HERE = Path(__file__).parent


# the file, and the lane of it: what is marked long runs with `pytest -m long`, the grid as a whole
RUNS = [
    ("interpreted.py", "not long"),
    ("interpreted_unaudited.py", "not long"),
    pytest.param("interpreted.py", "long", marks=pytest.mark.long),
    pytest.param("interpreted_unaudited.py", "long", marks=pytest.mark.long),
    ("interpreted_bounded.py", "not long"),
    pytest.param("interpreted_bounded.py", "long", marks=pytest.mark.long),
    ("interpreted_faults.py", "not long"),
    pytest.param("interpreted_faults.py", "long", marks=pytest.mark.long),
    ("interpreted_offset.py", "not long"),
    pytest.param("interpreted_offset.py", "long", marks=pytest.mark.long),
    pytest.param("interpreted_grid.py", "not long", marks=pytest.mark.long),
]


def test_all_files_are_run():
    listed = {(run.values if hasattr(run, "values") else run)[0] for run in RUNS}
    assert listed == {x.name for x in HERE.glob("interpreted*.py")}


@pytest.mark.parametrize(("file", "lane"), RUNS)
def test_kernels_in_the_interpreter(tmp_path, file, lane):
    root = HERE.parents[2]
    environment = {
        "PYTHONPATH": str(root),
        "OMP_NUM_THREADS": "1",
        "TRITON_INTERPRET": "1",
        "TRITON_CACHE_DIR": str(tmp_path),
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", lane, HERE / file],
        env={**os.environ, **environment},
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    if done.returncode != 0:
        pytest.fail(done.stdout[-6000:] + done.stderr[-2000:], pytrace=False)
