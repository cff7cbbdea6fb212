"""policy="hybrid" against the brute-force oracle, and what the audit promises."""

from itertools import pairwise

import pytest
import torch

from crisp_flex.routing.policies.hybrid import MULTIPLES
from crisp_flex.routing.reference import STAT_NAMES, select_blocks
from tests.routing.inputs import SHAPES, case, params, structured
from tests.routing.oracle import check


@pytest.mark.parametrize("name", SHAPES)
def test_balanced_equals_the_brute_force(name):
    inputs = case(name, policy="hybrid", dense_last_blocks=0)
    check(select_blocks(*inputs), *inputs)


@pytest.mark.parametrize(
    "changes",
    [
        {"coverage": 0.8, "coverage_reduce": "min"},
        {"coverage": 0.6, "audit_rows": 3},
        {"coverage": 0.97, "audit_rows": 1},
        {"coverage": 0.5, "dense_last_blocks": 2},
        {"coverage": 1.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["ragged small blocks", "left padding into a chunk", "holes"])
def test_settings_equal_the_brute_force(name, changes):
    inputs = case(name, seed=1, policy="hybrid", **{"dense_last_blocks": 0, **changes})
    check(select_blocks(*inputs), *inputs)


@pytest.mark.parametrize("reduce", ["mean", "min"])
def test_heads_choose_different_multiples_and_reach_the_target(reduce):
    pairs = [structured(1, 4, 2, 1000, strength=s) for s in (0, 1, 2, 3)]
    query, key = (torch.cat(x) for x in zip(*pairs, strict=True))
    audited = params(block=(64, 64), policy="hybrid", coverage=0.8, coverage_reduce=reduce)
    stats = select_blocks(query, key, None, audited).stats
    multiple = stats[..., STAT_NAMES.index("multiple")]
    tried = torch.tensor([0.0, *MULTIPLES])
    assert (multiple[..., None] == tried).any(-1).all()
    assert multiple.unique().numel() >= 3
    assert (stats[..., STAT_NAMES.index("coverage")] >= 0.8).all()
    assert (stats[..., 0] < stats[..., 1]).any()


def test_full_coverage_keeps_all_blocks():
    stats = select_blocks(*case("small blocks", policy="hybrid", coverage=1.0)).stats
    assert torch.equal(stats[..., 0], stats[..., 1])
    assert stats[..., STAT_NAMES.index("multiple")].eq(0).all()
    assert stats[..., STAT_NAMES.index("route")].eq(3).all()


def test_a_higher_target_keeps_no_fewer_blocks():
    kept = []
    for coverage in (0.3, 0.6, 0.8, 0.9, 0.99):
        inputs = case("ragged small blocks", policy="hybrid", coverage=coverage)
        kept.append(select_blocks(*inputs).keep)
    for fewer, more in pairwise(kept):
        assert (fewer & ~more).sum() == 0
    assert kept[0].sum() < kept[-1].sum()


def test_unknown_reduction_is_refused():
    inputs = case("one token", policy="hybrid", coverage_reduce="median")
    with pytest.raises(ValueError, match="coverage_reduce must be mean or min, got 'median'"):
        select_blocks(*inputs)
