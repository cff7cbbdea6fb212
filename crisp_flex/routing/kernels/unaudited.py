"""Policies "crisp", "streaming" and "dense" on the GPU, on the query's device.

probe -> (pool -> router -> lines, estimate) -> coverage -> lists -> stats, each as far as the
policy needs it. Oracle: reference.route. No read-back, no atomics: two runs give the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from crisp_flex.routing.kernels.crisp_estimate import estimate
from crisp_flex.routing.kernels.crisp_lines import cover_lines
from crisp_flex.routing.kernels.crisp_router import ROUTERS, route_heads
from crisp_flex.routing.kernels.kept import Rule
from crisp_flex.routing.kernels.kept_lists import kept_lists
from crisp_flex.routing.kernels.kept_stats import kept_stats
from crisp_flex.routing.kernels.layout import Layout
from crisp_flex.routing.kernels.masses import Masses, masses
from crisp_flex.routing.kernels.pool import pool
from crisp_flex.routing.kernels.probe import probe
from crisp_flex.routing.kernels.proxy_coverage import proxy_coverage
from crisp_flex.routing.kernels.route import takes
from crisp_flex.routing.kernels.tile import LOG2_E
from crisp_flex.routing.params import RouteParams

# A row of crisp that sees fewer blocks than this keeps them all.
SMALL_ROW_BLOCKS = 5


def supports(query: Tensor, key: Tensor, params: RouteParams) -> bool:
    """Whether the kernels take this call; the reference takes all."""
    if params.policy == "crisp":
        known = params.router in ROUTERS and params.k_min >= 0 and 0 < params.gamma <= 1
    else:
        known = params.policy in ("streaming", "dense")
    return known and takes(query, key, params)


def route(
    query: Tensor,
    key: Tensor,
    key_valid: Tensor | None,
    params: RouteParams,
    q_offset: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Block lists of sparse causal attention, in the layout of FlexAttention's BlockMask.

    Args:
        query: [B, Hq, Lq, D], any strides; query i stands at position i + q_offset.
        key: [B, Hkv, Lkv, D], Hq a multiple of Hkv, Lkv >= Lq, any strides.
        key_valid: [B, Lkv] bool, False for padding; None if every key is valid.
        params: Policy and its numbers; see supports.
        q_offset: [1] integer, on the same device, in [0, Lkv - Lq]; None is Lkv - Lq.

    Returns:
        As reference.route.
    """
    with torch.cuda.device_of(query):
        layout = Layout.of(query, key, key_valid, params, q_offset)
        covered = c_struct = None
        rule = Rule(recent_blocks=params.streaming_blocks)
        if params.policy != "dense":
            measured = _proxy_masses(query, key, layout, params)
            c_struct = measured.c_struct
            if params.policy == "crisp":
                rule = _crisp_rule(query, key, measured, layout, params)
            covered = proxy_coverage(measured, rule, layout)
        lists = kept_lists(rule, covered, layout, params, device=query.device)
        statistics = kept_stats(lists, c_struct, covered, rule, layout, params)
    return lists.counts, lists.buffer, lists.full_counts, statistics


def _proxy_masses(query: Tensor, key: Tensor, layout: Layout, params: RouteParams) -> Masses:
    sums = probe(query, key, layout, scale=params.scale, audit_rows=0)
    return masses(sums, layout, audit_rows=0, by_slot=True)


def _crisp_rule(
    query: Tensor, key: Tensor, measured: Masses, layout: Layout, params: RouteParams
) -> Rule:
    """What decides on each head under policy "crisp": lines or the pooled estimate."""
    mean_query, mean_key = pool(query, key, layout)
    route = route_heads(query, mean_key, measured, layout, params)
    lines = cover_lines(route, measured, layout, params)
    pooled = estimate(mean_query, mean_key, route, layout, params)
    return Rule(
        recent_blocks=1,
        small_row_blocks=SMALL_ROW_BLOCKS,
        route=route,
        verticals=lines.verticals,
        slashes=lines.slashes,
        mean_query=mean_query,
        mean_key=mean_key,
        row_log2=pooled.row_log2,
        above=pooled.above,
        gamma=pooled.gamma,
        octaves=pooled.octaves,
        exponent=params.scale * LOG2_E.value,
    )
