"""policy="oracle": per query block the fewest key blocks that hold the exact mass; evaluation only.

It computes all of attention's probabilities, one query block at a time, so it saves nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from crisp_flex.routing.geometry import Geometry
from crisp_flex.routing.guards import ROUTE_ESTIMATE, Choice, choose_or_keep_all
from crisp_flex.routing.params import RouteParams
from crisp_flex.routing.probe import probe, query_block_mass
from crisp_flex.routing.top_mass import top_mass


def select(query: Tensor, key: Tensor, geometry: Geometry, params: RouteParams) -> Choice:
    """The largest blocks of each row until they hold params.coverage of its exact mass."""
    g = geometry
    measured = probe(query, key, g, scale=params.scale, audit_rows=0)
    rows = []
    for block in range(g.Nq):
        key_limit = g.Lkv
        if isinstance(g.offset, int):
            key_limit = min((block + 1) * g.block_q + g.offset, g.Lkv)
        one = g.start.new_full((1,), block)
        mass = query_block_mass(query, key, g, one, key_limit, params.scale)
        rows.append(top_mass(mass, params.coverage))
    last = torch.arange(g.Nkv, device=query.device) == g.last_block[..., None]
    return choose_or_keep_all(
        (torch.stack(rows, 2) | last) & g.visible,
        measured,
        g,
        route=torch.full_like(measured.c_struct, ROUTE_ESTIMATE),
        max_uncovered=params.max_uncovered,
    )
