"""policy="flexprefill": token budgets by cumulative mass, routed by the Jensen-Shannon divergence.

Source: FlexPrefill, arXiv 2502.20766. Its slashes cover one block diagonal each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from crisp_flex.routing.geometry import Geometry
from crisp_flex.routing.guards import (
    ROUTE_ESTIMATE,
    ROUTE_VERTICAL_SLASH,
    Choice,
    choose_or_keep_all,
)
from crisp_flex.routing.lines import slash_anchors, vertical_anchors
from crisp_flex.routing.params import RouteParams
from crisp_flex.routing.policies.crisp import JSD_THRESHOLD, proxy_root_jsd
from crisp_flex.routing.pool import pool, pooled_map
from crisp_flex.routing.probe import probe
from crisp_flex.routing.top_mass import top_count, top_mass


def select(query: Tensor, key: Tensor, geometry: Geometry, params: RouteParams) -> Choice:
    """Per head as many lines as hold gamma; pooled heads keep the least lines and the map's top."""
    g = geometry
    measured = probe(query, key, g, scale=params.scale, audit_rows=0)
    mean_query, mean_key = pool(query, key, g)
    pooled = proxy_root_jsd(measured, mean_key, g, params.scale) < JSD_THRESHOLD

    least = max(params.min_budget // g.block_kv, 1)
    v_count = _budget(measured.token_mass, params.gamma, g.block_kv, least)
    s_count = _budget(measured.distance_mass, params.gamma, g.block_kv, least)
    v_count, s_count = (torch.where(pooled[..., None], least, n) for n in (v_count, s_count))
    verticals = top_count(measured.p_v, vertical_anchors(g)[1], v_count)
    slashes = top_count(measured.p_s, slash_anchors(g)[1], s_count)

    estimate = pooled_map(mean_query, mean_key, g.visible, params.scale)
    live = g.live[:, None, :, None]
    by_map = top_mass(estimate.masked_fill(~live, 0.0).flatten(2), params.gamma)
    by_map = by_map.view(estimate.shape) & pooled[..., None, None]

    blocks = torch.arange(g.Nkv, device=query.device)
    ends = (blocks == g.first_block[:, None, None, None]) | (blocks == g.last_block[..., None])
    keep = (verticals[:, :, None] | _diagonals(slashes, g) | by_map | ends) & g.visible
    return choose_or_keep_all(
        keep,
        measured,
        g,
        route=torch.where(pooled, ROUTE_ESTIMATE, ROUTE_VERTICAL_SLASH),
        max_uncovered=params.max_uncovered,
    )


def _budget(mass: Tensor, gamma: float, block: int, least: int) -> Tensor:
    """[B, Hq, 1] int64 lines: tokens until mass [B, Hq, L] holds gamma, in blocks, plus one."""
    total = mass.sort(dim=-1, descending=True).values.cumsum(-1)
    tokens = (total <= gamma).sum(-1, keepdim=True) + 1
    return (tokens // block + 1).clamp(min=least)


def _diagonals(slashes: Tensor, g: Geometry) -> Tensor:
    """[B, Hq, Nq, Nkv] bool: block diagonal t of each kept bin t, from a row's last position."""
    _, hi = g.slash_bins()
    bins = hi[:, None] - torch.arange(g.Nkv, device=hi.device)
    exists = (bins >= 0) & (bins < g.Nkv)
    B, Hq = slashes.shape[:2]
    index = bins.clamp(0, g.Nkv - 1).flatten().expand(B, Hq, -1)
    return slashes.gather(-1, index).view(B, Hq, g.Nq, g.Nkv) & exists
