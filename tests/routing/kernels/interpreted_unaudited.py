"""Policies "crisp", "streaming" and "dense" in Triton's interpreter, on odd shapes and settings.

Collected by test_interpreter.py; see interpreted.py.
"""

import dataclasses

import pytest
import torch

from crisp_flex.routing import reference
from crisp_flex.routing.geometry import Geometry
from crisp_flex.routing.guards import ROUTE_ESTIMATE
from crisp_flex.routing.kernels import crisp_estimate, crisp_router, dispatch, unaudited
from crisp_flex.routing.kernels.layout import Layout
from crisp_flex.routing.kernels.masses import masses
from crisp_flex.routing.kernels.probe import probe
from crisp_flex.routing.policies import crisp
from crisp_flex.routing.pool import pooled_map
from tests.routing.inputs import case, params, structured
from tests.routing.kernels.compare import MASS_BUDGET, kept
from tests.routing.kernels.compare_unaudited import (
    all_blocks,
    check_estimate_mass,
    check_unaudited,
    pooled,
)
from tests.routing.kernels.interpreted import inputs, long, poisoned  # noqa: F401

LINES = {"policy": "crisp", "router": "vs", "max_uncovered": 1.0}
ESTIMATE = {"policy": "crisp", "router": "pe", "max_uncovered": 1.0}


def shape(name, **changes):
    query, key, key_valid, settings = inputs(name)
    return query, key, key_valid, dataclasses.replace(settings, **changes)


@pytest.mark.parametrize(
    "name",
    [
        long("ragged"),
        long("aligned"),
        long("ragged small blocks"),
        "mixed blocks in a chunk",
        "few holes",
        long("mixed blocks, holes"),
        long("chunk one short of a block"),
        long("left padding into a chunk"),
        long("right padding"),
        "no valid key in one sequence",
    ],
)
@pytest.mark.parametrize("route", [LINES, ESTIMATE], ids=["lines", "estimate"])
def test_crisp_equals_the_reference(name, route):
    arguments = shape(name, dense_last_blocks=0, **route)
    kept = check_unaudited(*arguments)
    if route is ESTIMATE:
        check_estimate_mass(*arguments, kept)


@pytest.mark.parametrize(
    "name",
    [
        "few small blocks",
        "few holes",
        "short padding",
        "mixed blocks in a chunk",
        long("ragged small blocks"),
        long("holes"),
        long("ragged chunk"),
    ],
)
@pytest.mark.parametrize("policy", ["streaming", "dense"])
def test_fixed_policies_equal_the_reference(name, policy):
    check_unaudited(*shape(name, policy=policy, streaming_blocks=2, dense_last_blocks=2))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("few small blocks", {**LINES, "k_min": 0, "alpha": 0.5}),
        ("few small blocks", {**LINES, "k_min": 3, "alpha": 1000.0}),
        ("few small blocks", {**LINES, "k_min": 40}),
        ("few holes", {**LINES, "k_min": 2, "alpha": 2.0, "dense_last_blocks": 2}),
        ("few small blocks", {**ESTIMATE, "gamma": 0.6}),
        ("few small blocks", {**ESTIMATE, "gamma": 0.2}),
        ("few small blocks", {**ESTIMATE, "gamma": 1.0}),
        ("few holes", {**ESTIMATE, "gamma": 0.8, "dense_last_blocks": 2}),
        long("ragged small blocks", {**LINES, "k_min": 5, "alpha": 1000.0}),
        long("holes", {**LINES, "k_min": 2, "alpha": 2.0, "dense_last_blocks": 2}),
        long("ragged small blocks", {**ESTIMATE, "gamma": 0.6}),
        long("holes", {**ESTIMATE, "gamma": 0.8, "dense_last_blocks": 2}),
    ],
    ids=str,
)
def test_settings_equal_the_reference(name, changes):
    check_unaudited(*shape(name, **changes))


@pytest.mark.parametrize(
    ("name", "router"),
    [
        ("four heads", "c_struct"),
        ("short padding", "jsd"),
        long("left padding", "c_struct"),
        long("small blocks", "jsd"),
    ],
)
def test_routers_equal_the_reference(name, router):
    check_unaudited(*shape(name, policy="crisp", router=router, tau=0.4, max_uncovered=1.0))


@pytest.mark.parametrize("name", ["four heads", long("short padding")])
def test_the_divergence_splits_heads_where_the_reference_does(name, monkeypatch):
    query, key, key_valid, settings = shape(name, **{**ESTIMATE, "router": "jsd"})
    g = Geometry.of(query, key, key_valid, settings)
    measured = reference.probe(query, key, g, scale=settings.scale, audit_rows=0)
    mean_key = reference.pool(query, key, g)[1]
    mean_query = measured.mean_query[:, :, None]
    estimate = pooled_map(mean_query, mean_key, g.filled[:, None, None], settings.scale)
    roots = crisp.root_jsd(estimate[:, :, 0], measured.p_v)
    threshold = float(roots.min() + roots.max()) / 2
    monkeypatch.setattr(crisp_router, "JSD_THRESHOLD", threshold)
    layout = Layout.of(query, key, key_valid, settings)
    sums = probe(query, key, layout, scale=settings.scale, audit_rows=0)
    by_kernel = masses(sums, layout, audit_rows=0)

    def takes_estimate():
        route = crisp_router.route_heads(query, mean_key, by_kernel, layout, settings)
        return route == ROUTE_ESTIMATE

    assert torch.equal(takes_estimate(), roots < threshold)
    # just above the least one, where a wrong factor would show
    monkeypatch.setattr(crisp_router, "JSD_THRESHOLD", float(roots.min()) * 1.01)
    assert takes_estimate().sum() == 1


def test_both_routes_occur_in_one_call():
    query, key, key_valid, settings = shape("four heads", policy="crisp", max_uncovered=1.0)
    g = Geometry.of(query, key, key_valid, settings)
    c_struct = reference.probe(query, key, g, scale=settings.scale, audit_rows=0).c_struct
    settings = dataclasses.replace(settings, tau=float(c_struct.median()) + 1e-3)
    check_unaudited(query, key, key_valid, settings)
    takes_estimate = pooled(reference.route(query, key, key_valid, settings)[3])
    assert takes_estimate.any()
    assert not takes_estimate.all()


@pytest.mark.parametrize("policy", ["crisp", "streaming"])
def test_a_head_that_leaves_too_much_out_keeps_all_blocks(policy):
    changes = {"policy": policy, "streaming_blocks": 1, "k_min": 0, "alpha": 4.0}
    query, key, key_valid, settings = shape("few small blocks", max_uncovered=1.0, **changes)
    coverage = reference.route(query, key, key_valid, settings)[3][..., 3]
    middle = float(coverage.max() + coverage.min()) / 2
    settings = dataclasses.replace(settings, max_uncovered=1 - middle)
    check_unaudited(query, key, key_valid, settings)
    full = all_blocks(reference.route(query, key, key_valid, settings)[3])
    assert full.any()
    assert not full.all()


@pytest.mark.parametrize(
    "name", ["mixed blocks in a chunk", "few holes", long("small blocks"), long("ragged chunk")]
)
def test_proxy_masses_by_query_block(name):
    query, key, key_valid, settings = shape(name, policy="crisp")
    g = Geometry.of(query, key, key_valid, settings)
    want = reference.probe(query, key, g, scale=settings.scale, audit_rows=0).proxy_mass
    layout = Layout.of(query, key, key_valid, settings)
    sums = probe(query, key, layout, scale=settings.scale, audit_rows=0)
    got = masses(sums, layout, audit_rows=0, by_slot=True).by_slot
    slots = got.shape[2]
    assert (got - want[:, :, :slots]).abs().max() < MASS_BUDGET
    assert (want[:, :, slots:] == 0).all()


def test_equal_masses_are_kept_from_the_lowest_index():
    # no query prefers a key, so that all verticals in the middle have the same mass
    query, key = torch.zeros(1, 1, 1280, 16), torch.ones(1, 1, 1280, 16)
    settings = params(16, (64, 64), alpha=1.5, k_min=6, dense_last_blocks=0, **LINES)
    last_row = [
        kept(route(query, key, None, settings), 20)[0, 0, 19].nonzero().flatten().tolist()
        for route in (dispatch.route, reference.route)
    ]
    # the first column, the 6 verticals after it, and diagonals that end before block 8
    assert last_row[0][:8] == [0, 1, 2, 3, 4, 5, 6, last_row[1][7]]
    assert last_row[0][7] > 8


def test_half_precision_and_transposed_storage():
    query, key = structured(1, 2, 1, 200, 200, 64, dtype=torch.float16)
    query, key = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key))
    for changes in (LINES, {"policy": "crisp", "router": "jsd"}):
        check_unaudited(query, key, None, params(64, **changes))


@pytest.mark.parametrize("changes", [LINES, ESTIMATE, {"policy": "streaming"}], ids=str)
def test_what_stands_in_padding_is_not_read(changes):
    query, key, key_valid, settings = shape("padding, one head", **changes)
    want = dispatch.route(query, key, key_valid, settings)
    offset = key.shape[2] - query.shape[2]
    key = key.masked_fill(~key_valid[:, None, :, None], float("nan"))
    query = query.masked_fill(~key_valid[:, None, offset:, None], float("nan"))
    for x, y in zip(dispatch.route(query, key, key_valid, settings), want, strict=True):
        assert torch.equal(x, y)


def test_the_last_ladder_resolves_what_the_budget_asks():
    octaves = crisp_estimate.first_octaves(4096, 0.95)
    rungs = crisp_estimate.RUNGS.value
    assert octaves / (rungs - 1) / rungs ** (crisp_estimate.LEVELS - 1) < 1e-3


def test_constants_are_those_of_the_policy():
    assert crisp_router.JSD_THRESHOLD == crisp.JSD_THRESHOLD
    assert unaudited.SMALL_ROW_BLOCKS == crisp._SMALL_ROW_BLOCKS


def test_kernels_take_what_the_policies_take():
    query, key, _, settings = case("ragged", dtype=torch.bfloat16, policy="crisp")
    for router in crisp_router.ROUTERS:
        assert dispatch.supports(query, key, dataclasses.replace(settings, router=router))
    for policy in ("hybrid", "streaming", "dense"):
        assert dispatch.supports(query, key, dataclasses.replace(settings, policy=policy))
    assert not dispatch.supports(query, key, dataclasses.replace(settings, router="other"))
    assert not dispatch.supports(query, key, dataclasses.replace(settings, policy="other"))
    assert not dispatch.supports(query.float(), key.float(), settings)
