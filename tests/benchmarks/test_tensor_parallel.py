"""benchmarks/tensor_parallel.py with two ranks on the CPU: local heads sparse, logits equal."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "tensor_parallel.py"


@pytest.mark.slow
def test_two_ranks_are_sparse_over_their_own_heads():
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run = subprocess.run(
        [*launch, str(SCRIPT), "--device", "cpu"],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    for rank in (0, 1):
        assert f"rank {rank}: 1 of 1 calls sparse, heads a route [4]" in run.stdout
