"""A slice of the fuzzer with fixed examples; CRISP_FLEX_FUZZ multiplies how many.

By hand and at length: python -m tests.fuzz --lane routing --examples 20000
"""

import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from tests.fuzz.lanes import LANES

# Examples of a lane; about a minute of one core in all.
EXAMPLES = {"routing": 150, "masks": 250, "symbolic": 8, "gpu": 40}


def fuzz(lane):
    strategy, check = LANES[lane]()
    count = max(int(EXAMPLES[lane] * float(os.environ.get("CRISP_FLEX_FUZZ", "1"))), 1)

    @settings(
        max_examples=count, derandomize=True, database=None, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(strategy)
    def run(example):
        outcomes.add(check(example))

    outcomes = set()
    with torch.no_grad():
        run()
    return outcomes


@pytest.mark.slow
def test_routing():
    assert "compared" in fuzz("routing")


@pytest.mark.slow
def test_mask_programs():
    assert fuzz("masks") == {"rewritten", "refused"}


@pytest.mark.slow
def test_mask_programs_whose_lengths_are_symbols():
    assert fuzz("symbolic") == {"rewritten", "refused"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_calls_on_the_gpu():
    assert fuzz("gpu") == {"hybrid", "streaming", "dense"}
