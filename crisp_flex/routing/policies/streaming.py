"""policy="streaming": the first column and the last diagonals, whatever the tokens say."""

from __future__ import annotations

import torch
from torch import Tensor

from crisp_flex.routing.geometry import Geometry
from crisp_flex.routing.guards import ROUTE_VERTICAL_SLASH, Choice, choose_or_keep_all
from crisp_flex.routing.lines import always
from crisp_flex.routing.params import RouteParams
from crisp_flex.routing.probe import probe


def select(query: Tensor, key: Tensor, geometry: Geometry, params: RouteParams) -> Choice:
    """Column f(I), and the last params.streaming_blocks key blocks that each row sees.

    The diagonals of the 128-token recency window are kept even if streaming_blocks is less.
    """
    B, Hq = query.shape[:2]
    measured = probe(query, key, geometry, scale=params.scale, audit_rows=0)
    blocks = torch.arange(geometry.Nkv, device=query.device)
    recent = blocks > geometry.last_block[..., None] - params.streaming_blocks
    keep = (recent | always(geometry)) & geometry.visible
    return choose_or_keep_all(
        keep.expand(B, Hq, -1, -1),
        measured,
        geometry,
        route=torch.full((B, Hq), ROUTE_VERTICAL_SLASH, device=query.device),
        max_uncovered=params.max_uncovered,
    )
