"""policy="crisp": the paper's method: a head takes the vertical-slash or the pooled-estimate route.

Source: CRISP, arXiv 2609.01925, Algorithms 1 to 4; here with anchors for ragged lengths and with
every block that a slash touches. The "jsd" router is FlexPrefill's, arXiv 2502.20766.
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
from crisp_flex.routing.lines import always, cover, select_lines
from crisp_flex.routing.params import RouteParams
from crisp_flex.routing.pool import pool, pooled_map
from crisp_flex.routing.probe import Probe, probe
from crisp_flex.routing.top_mass import top_mass

# Square root of the Jensen-Shannon divergence below which FlexPrefill trusts the pooled estimate.
JSD_THRESHOLD = 0.1
# A row that sees fewer blocks than this keeps them all.
_SMALL_ROW_BLOCKS = 5


def select(query: Tensor, key: Tensor, geometry: Geometry, params: RouteParams) -> Choice:
    """Per head the lines above the noise floor, or the pooled blocks with gamma of the mass."""
    measured = probe(query, key, geometry, scale=params.scale, audit_rows=0)
    mean_query, mean_key = pool(query, key, geometry)
    takes_lines = _takes_lines(measured, mean_key, geometry, params)

    lines = select_lines(measured, geometry, params.alpha, k_min=params.k_min)
    by_lines = cover(lines, geometry)
    estimate = pooled_map(mean_query, mean_key, geometry.visible, params.scale)
    live = geometry.live[:, None, :, None]
    known = estimate.masked_fill(~live | estimate.isnan(), 0.0)
    by_estimate = top_mass(known.flatten(2), params.gamma).view(estimate.shape)
    by_estimate = by_estimate | estimate.isnan()  # such a row keeps all it sees

    keep = torch.where(takes_lines[:, :, None, None], by_lines, by_estimate)
    small = (geometry.visible_blocks < _SMALL_ROW_BLOCKS)[..., None]
    keep = (keep | always(geometry) | small) & geometry.visible
    return choose_or_keep_all(
        keep,
        measured,
        geometry,
        route=torch.where(takes_lines, ROUTE_VERTICAL_SLASH, ROUTE_ESTIMATE),
        max_uncovered=params.max_uncovered,
    )


def root_jsd(p: Tensor, q: Tensor) -> Tensor:
    """[...]: square root of the Jensen-Shannon divergence (in nats) of p and q [..., N]."""
    mean = (p + q) / 2
    # xlogy(0, 0) is 0, and mean is 0 only where p and q are
    divergence = torch.xlogy(p, p) + torch.xlogy(q, q) - torch.xlogy(p, mean) - torch.xlogy(q, mean)
    return (divergence.sum(-1) / 2).clamp(min=0).sqrt()


def proxy_root_jsd(measured: Probe, mean_key: Tensor, g: Geometry, scale: float) -> Tensor:
    """[B, Hq]: root_jsd of the proxy rows' block masses and of their pooled estimate."""
    filled = g.filled[:, None, None]
    estimate = pooled_map(measured.mean_query[:, :, None], mean_key, filled, scale)
    return root_jsd(estimate[:, :, 0], measured.p_v)


def _takes_lines(measured: Probe, mean_key: Tensor, g: Geometry, params: RouteParams) -> Tensor:
    """[B, Hq] bool: the head takes the vertical-slash route."""
    if params.router == "c_struct":
        return measured.c_struct >= params.tau
    if params.router == "jsd":
        return proxy_root_jsd(measured, mean_key, g, params.scale) >= JSD_THRESHOLD
    if params.router in ("vs", "pe"):
        return torch.full_like(measured.c_struct, params.router == "vs", dtype=torch.bool)
    raise ValueError(f"router must be c_struct, jsd, vs or pe, got {params.router!r}")
