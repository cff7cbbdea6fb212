"""The kernels of policies without an audit beside the reference, and what rounding decides."""

import dataclasses

import torch

from crisp_flex.routing import reference
from crisp_flex.routing.geometry import Geometry, take_rows
from crisp_flex.routing.guards import ROUTE_ALL_BLOCKS, ROUTE_ESTIMATE
from crisp_flex.routing.kernels import crisp_estimate, dispatch
from crisp_flex.routing.lines import Lines, cover, slash_anchors, vertical_anchors
from crisp_flex.routing.params import STAT_NAMES
from crisp_flex.routing.policies import SELECT, crisp
from crisp_flex.routing.pool import pooled_map
from crisp_flex.routing.top_mass import top_mass
from tests.routing.kernels.compare import (
    DECISION_BUDGET,
    Doubt,
    check_results,
    kept,
    line_floor,
    near,
)

# Of the mass of a head, at the threshold of the pooled estimate.
ESTIMATE_BUDGET = 1e-3


def check_unaudited(query, key, key_valid, params, q_offset=None):
    """Assert that the kernels' lists and statistics are the reference's; returns their map."""
    got = dispatch.route(query, key, key_valid, params, q_offset)
    want = reference.route(query, key, key_valid, params, q_offset)
    unclear = doubt(query, key, key_valid, params, q_offset)
    Nkv = -(-key.shape[2] // params.block_kv)
    return check_results(got, want, unclear, Nkv, most_unclear=0.02)


def check_estimate_mass(query, key, key_valid, params, got=None):
    """Assert that pooled-estimate heads keep gamma of the pooled mass, as the reference does.

    got is the kernels' map if params already are those of a pure estimate.
    """
    given = params
    params = dataclasses.replace(params, router="pe", max_uncovered=1.0, dense_last_blocks=0)
    g = Geometry.of(query, key, key_valid, params)
    estimate = pooled_map(*reference.pool(query, key, g), g.visible, params.scale)
    estimate = estimate.masked_fill(~g.live[:, None, :, None], 0.0)
    if got is None:
        got = kept(dispatch.route(query, key, key_valid, params), g.Nkv)
    else:
        assert params == given
    got = got > 0
    want = kept(reference.route(query, key, key_valid, params), g.Nkv) > 0
    total = estimate.sum((-2, -1)).clamp(min=1e-30)
    mass = (estimate * got).sum((-2, -1)) / total
    reference_mass = (estimate * want).sum((-2, -1)) / total
    assert (mass - reference_mass).abs().max() < ESTIMATE_BUDGET


def doubt(query, key, key_valid, params, q_offset=None):
    """The Doubt of a call, by the eager stages."""
    g = Geometry.of(query, key, key_valid, params, q_offset)
    B, Hq = query.shape[:2]
    block = torch.zeros(B, Hq, g.Nq, g.Nkv, dtype=torch.bool, device=query.device)
    head = torch.zeros(B, Hq, dtype=torch.bool, device=query.device)
    if params.policy == "dense":
        return Doubt(block, head, head.float())
    measured = reference.probe(query, key, g, scale=params.scale, audit_rows=0)
    if params.policy == "crisp":
        means = reference.pool(query, key, g)
        if params.router == "c_struct":
            head = (measured.c_struct - params.tau).abs() < DECISION_BUDGET
        elif params.router == "jsd":
            estimate = pooled_map(
                measured.mean_query[:, :, None], means[1], g.filled[:, None, None], params.scale
            )
            jsd = crisp.root_jsd(estimate[:, :, 0], measured.p_v)
            head = (jsd - crisp.JSD_THRESHOLD).abs() < DECISION_BUDGET
        takes_lines = crisp._takes_lines(measured, means[1], g, params)[..., None, None]
        lines = Lines(
            unclear_lines(measured.p_v, *vertical_anchors(g), params),
            unclear_lines(measured.p_s, *slash_anchors(g), params),
        )
        by_estimate = unclear_entries(pooled_map(*means, g.visible, params.scale), g, params)
        block = torch.where(takes_lines, cover(lines, g), by_estimate) & g.visible
    choice = SELECT[params.policy](query, key, g, dataclasses.replace(params, max_uncovered=1.0))
    on_proxy = measured.proxy_mass * take_rows(block, measured.proxy_blocks)
    mass = on_proxy.sum((-2, -1)).nan_to_num(0.0)  # nothing is in doubt where all is unknown
    slack = (1 - choice.coverage - params.max_uncovered).abs()
    return Doubt(block, head | (slack < DECISION_BUDGET + mass), mass)


def unclear_lines(p, anchor, entry, params):
    """[B, Hq, Nkv]: lines near the floor, or near the k_min-th largest."""
    candidate = entry & ~anchor
    unclear = near(p, params.alpha * line_floor(p, anchor, entry)) & candidate
    if params.k_min:
        ordered = torch.where(candidate, p, -1.0).sort(-1, descending=True).values
        last = ordered[..., min(params.k_min, p.shape[-1]) - 1 :][..., :1]
        close = ((p - last).abs() <= DECISION_BUDGET * last) & candidate
        # the k_min-th itself is decided where no other is close to it
        unclear |= close & (close.sum(-1, keepdim=True) > 1)
    return unclear


def unclear_entries(estimate, g, params):
    """[B, Hq, Nq, Nkv]: entries between the kernels' threshold and the exact one."""
    estimate = estimate.masked_fill(~g.live[:, None, :, None] | estimate.isnan(), 0.0)
    by_mass = top_mass(estimate.flatten(2), params.gamma).view(estimate.shape)
    smallest = torch.where(by_mass, estimate, 2.0).amin((-2, -1), keepdim=True)
    rungs = crisp_estimate.RUNGS.value
    octaves = crisp_estimate.first_octaves(g.Nkv, params.gamma)
    resolution = octaves / (rungs - 1) / rungs ** (crisp_estimate.LEVELS - 1)
    low = smallest * 2.0**-resolution * (1 - DECISION_BUDGET)
    unclear = (estimate >= low) & (estimate <= smallest * (1 + DECISION_BUDGET))
    # the reference keeps the smallest one; alone, it is clear
    return unclear & (unclear.sum((-2, -1), keepdim=True) > 1)


def all_blocks(stats):
    """[B, Hq] bool of a route's statistics: which heads keep all blocks."""
    return stats[..., STAT_NAMES.index("route")] == ROUTE_ALL_BLOCKS


def pooled(stats):
    """[B, Hq] bool of a route's statistics: which heads take the pooled estimate."""
    return stats[..., STAT_NAMES.index("route")] == ROUTE_ESTIMATE
