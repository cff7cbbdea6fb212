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


FILES = [
    pytest.param(x.name, marks=pytest.mark.long if x.stem.endswith("grid") else ())
    for x in sorted(HERE.glob("interpreted*.py"))
]


@pytest.mark.parametrize("file", FILES)
def test_kernels_in_the_interpreter(tmp_path, file):
    root = HERE.parents[2]
    environment = {
        "PYTHONPATH": str(root),
        "OMP_NUM_THREADS": "1",
        "TRITON_INTERPRET": "1",
        "TRITON_CACHE_DIR": str(tmp_path),
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", HERE / file],
        env={**os.environ, **environment},
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    if done.returncode != 0:
        pytest.fail(done.stdout[-6000:] + done.stderr[-2000:], pytrace=False)
