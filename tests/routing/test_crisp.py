"""policy="crisp" against the brute-force oracle, its routers, and the paper's aligned case."""

import pytest
import torch

from crisp_flex.routing.geometry import Geometry
from crisp_flex.routing.lines import above_floor, slash_anchors, vertical_anchors
from crisp_flex.routing.policies.crisp import root_jsd
from crisp_flex.routing.probe import probe
from crisp_flex.routing.reference import STAT_NAMES, select_blocks
from tests.routing.inputs import SHAPES, case, params, structured
from tests.routing.oracle import check

ROUTE = STAT_NAMES.index("route")


@pytest.mark.parametrize("name", SHAPES)
def test_defaults_equal_the_brute_force(name):
    inputs = case(name, policy="crisp")
    check(select_blocks(*inputs), *inputs)


@pytest.mark.parametrize("router", ["c_struct", "jsd", "vs", "pe"])
@pytest.mark.parametrize(
    "name", ["ragged small blocks", "half key blocks", "ragged chunk", "left padding", "holes"]
)
def test_routers_equal_the_brute_force(name, router):
    bare = {"dense_last_blocks": 0, "max_uncovered": 1.0, "k_min": 2, "gamma": 0.7, "tau": 0.5}
    inputs = case(name, seed=2, policy="crisp", router=router, **bare)
    check(select_blocks(*inputs), *inputs)


def test_c_struct_sends_some_heads_each_way():
    query, key = structured(2, 4, 2, 1000)
    stats = select_blocks(query, key, None, params(policy="crisp", max_uncovered=1.0)).stats
    by_lines = stats[..., STAT_NAMES.index("c_struct")] >= 0.2
    assert 0 < by_lines.sum() < by_lines.numel()
    assert torch.equal(stats[..., ROUTE], torch.where(by_lines, 0.0, 1.0))


def test_jsd_trusts_the_pooled_map_only_where_it_agrees_with_the_proxy_rows():
    query, key = torch.zeros(1, 2, 1024, 16), torch.zeros(1, 2, 1024, 16)
    query[..., 0] = 4
    key[:, 0, :128, 0] = 12  # a whole block: its mean tells
    key[:, 1, 400, 0] = 12  # one token: its block's mean does not
    p = params(D=16, policy="crisp", router="jsd", max_uncovered=1.0)
    assert select_blocks(query, key, None, p).stats[0, :, ROUTE].tolist() == [1, 0]


def test_the_aligned_floor_is_the_papers():
    query, key, _, p = case("aligned", policy="crisp")
    geometry = Geometry.of(query, key, None, p)
    measured = probe(query, key, geometry, scale=p.scale, audit_rows=0)
    for mass, (anchor, entry) in (
        (measured.p_v, vertical_anchors(geometry)),
        (measured.p_s, slash_anchors(geometry)),
    ):
        assert anchor[0, 0].nonzero().flatten().tolist() == [0, 4]
        floor = (1 - mass[..., 0] - mass[..., -1]) / 3
        got = above_floor(mass, anchor, entry, 1.0, k_min=0)
        assert torch.equal(got[..., 1:4], mass[..., 1:4] > floor[..., None])


@pytest.mark.parametrize(
    ("name", "verticals", "slashes"),
    [
        ("aligned", [0, 4], [0, 4]),
        ("long and ragged", [0, 6, 7], [0, 1, 6, 7]),
        ("small blocks", [0, 8, 9], [0, 1, 8, 9]),
        ("one more than a block", [0, 1], [0, 1]),
        ("one token", [0], [0]),
    ],
)
def test_anchors(name, verticals, slashes):
    query, key, key_valid, p = case(name)
    geometry = Geometry.of(query, key, key_valid, p)
    assert vertical_anchors(geometry)[0][0, 0].nonzero().flatten().tolist() == verticals
    assert slash_anchors(geometry)[0][0, 0].nonzero().flatten().tolist() == slashes


def test_k_min_takes_the_lower_index_of_equal_masses():
    mass = torch.tensor([[[0.3, 0.1, 0.1, 0.1, 0.1, 0.3]]])
    anchor = torch.tensor([[[True, False, False, False, False, True]]])
    kept = above_floor(mass, anchor, torch.ones_like(anchor), 2.0, k_min=2)
    assert kept[0, 0].tolist() == [True, True, True, False, False, True]


def test_no_mass_beside_the_anchors_keeps_only_them():
    mass = torch.tensor([[[0.5, 0.0, 1e-5, 0.0, 0.0, 0.5]]])
    anchor = torch.tensor([[[True, False, False, False, False, True]]])
    kept = above_floor(mass, anchor, torch.ones_like(anchor), 1.0, k_min=0)
    assert kept[0, 0].tolist() == [True, False, False, False, False, True]


def test_root_jsd_of_equal_and_of_disjoint_distributions():
    p = torch.tensor([0.25, 0.75, 0.0, 0.0])
    q = torch.tensor([0.0, 0.0, 0.5, 0.5])
    assert root_jsd(p, p) == 0
    torch.testing.assert_close(root_jsd(p, q), torch.tensor(2.0).log().sqrt())


def test_max_uncovered_keeps_all_blocks_of_the_heads_above_it():
    query, key = structured(2, 4, 2, 1000)
    p = {"policy": "crisp", "router": "vs", "k_min": 0, "alpha": 2.0, "dense_last_blocks": 0}
    bare = select_blocks(query, key, None, params(**p, max_uncovered=1.0))
    lost = 1 - bare.stats[..., STAT_NAMES.index("coverage")]
    limit = lost.median().item()
    guarded = select_blocks(query, key, None, params(**p, max_uncovered=limit))
    above = lost > limit
    assert 0 < above.sum() < above.numel()
    assert torch.equal(guarded.stats[..., ROUTE], torch.where(above, 3.0, 0.0))
    assert torch.equal(guarded.keep[~above], bare.keep[~above])
    kept, visible = guarded.stats[..., 0], guarded.stats[..., 1]
    assert torch.equal(kept[above], visible[above])


def test_unknown_router_is_refused():
    with pytest.raises(ValueError, match="router must be c_struct, jsd, vs or pe, got 'coin'"):
        select_blocks(*case("one token", policy="crisp", router="coin"))
