"""The baseline policies and coverage_min against the brute force, and scenes of known outcome."""

import pytest
import torch

from crisp_flex.routing.kernels.dispatch import supports
from crisp_flex.routing.reference import select_blocks
from tests.routing.inputs import case, params
from tests.routing.oracle import check

BARE = {"max_uncovered": 1.0, "dense_last_blocks": 0}
SETTINGS = {
    "flexprefill": {"gamma": 0.5, "min_budget": 64},
    "minference": {"vertical_tokens": 100, "slash_tokens": 130},
    "xattention": {"threshold": 0.6, "stride": 16},
    "oracle": {"coverage": 0.6},
}


@pytest.mark.parametrize("policy", SETTINGS)
@pytest.mark.parametrize(
    "name", ["ragged", "half key blocks", "short chunk of small blocks", "left padding", "holes"]
)
def test_baselines_equal_the_brute_force(name, policy):
    inputs = case(name, policy=policy, **BARE, **SETTINGS[policy])
    check(select_blocks(*inputs), *inputs)


@pytest.mark.parametrize("least", [0.6, 0.8])
@pytest.mark.parametrize("name", ["ragged small blocks", "left padding into a chunk"])
def test_coverage_min_equals_the_brute_force(name, least):
    inputs = case(
        name, seed=1, policy="hybrid", coverage=0.5, coverage_min=least, dense_last_blocks=0
    )
    check(select_blocks(*inputs), *inputs)


def test_the_kernels_leave_coverage_min_to_the_reference():
    q, k = torch.zeros(1, 2, 256, 64).half(), torch.zeros(1, 1, 256, 64).half()
    assert supports(q, k, params(D=64))
    assert not supports(q, k, params(D=64, coverage_min=0.1))
    for policy in SETTINGS:
        assert not supports(q, k, params(D=64, policy=policy))


@pytest.mark.parametrize("policy", SETTINGS)
def test_a_needle_block_is_found(policy):
    query, key = torch.zeros(1, 1, 1024, 16), torch.zeros(1, 1, 1024, 16)
    query[..., 0] = 16
    key[:, :, 320:384, 0] = 16  # a whole block of 64, so that means and antidiagonals see it
    p = params(
        D=16, block=(64, 64), policy=policy, gamma=0.9, min_budget=64, vertical_tokens=64,
        slash_tokens=64, **BARE,
    )  # fmt: skip
    keep = select_blocks(query, key, None, p).keep[0, 0]
    assert keep[5:, 5].all()
    assert keep.sum() < torch.ones_like(keep).tril().sum()
    if policy == "oracle":
        assert keep[6:].sum(-1).eq(2).all()  # the needle and the diagonal
