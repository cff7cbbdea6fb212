"""policy="minference": verticals and slashes with fixed budgets, from the last 64 queries.

Source: MInference, arXiv 2407.02490, vertical-slash heads; here lines are whole key blocks and
distance bins, and every head is of this kind (the paper's offline search of a kind is left out).
"""

from __future__ import annotations

import torch
from torch import Tensor

from crisp_flex.routing.geometry import Geometry
from crisp_flex.routing.guards import ROUTE_VERTICAL_SLASH, Choice, choose_or_keep_all
from crisp_flex.routing.lines import Lines, always, cover, slash_anchors, vertical_anchors
from crisp_flex.routing.params import RouteParams
from crisp_flex.routing.probe import probe
from crisp_flex.routing.top_mass import top_count

# Queries that the paper estimates from (section 3.2, vertical-slash).
_PROXY_TOKENS = 64


def select(query: Tensor, key: Tensor, geometry: Geometry, params: RouteParams) -> Choice:
    """The ceil(tokens / block) heaviest lines of each direction, the sink and the recent blocks."""
    short = probe(
        query, key, geometry, scale=params.scale, audit_rows=0, proxy_tokens=_PROXY_TOKENS
    )
    verticals = -(-params.vertical_tokens // geometry.block_kv)
    slashes = -(-params.slash_tokens // geometry.block_kv)
    lines = Lines(
        verticals=top_count(short.p_v, vertical_anchors(geometry)[1], verticals),
        slashes=top_count(short.p_s, slash_anchors(geometry)[1], slashes),
    )
    keep = (cover(lines, geometry) | always(geometry)) & geometry.visible
    # the statistics and the guard look at as many rows as for the other policies
    measured = probe(query, key, geometry, scale=params.scale, audit_rows=0)
    return choose_or_keep_all(
        keep,
        measured,
        geometry,
        route=torch.full_like(measured.c_struct, ROUTE_VERTICAL_SLASH),
        max_uncovered=params.max_uncovered,
    )
