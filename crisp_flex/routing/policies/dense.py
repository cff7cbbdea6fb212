"""policy="dense": every visible block, so that the sparse kernel computes dense attention."""

from __future__ import annotations

import torch
from torch import Tensor

from crisp_flex.routing.geometry import Geometry
from crisp_flex.routing.guards import NOT_MEASURED, ROUTE_ALL_BLOCKS, Choice
from crisp_flex.routing.params import RouteParams


def select(query: Tensor, key: Tensor, geometry: Geometry, params: RouteParams) -> Choice:
    """All visible blocks; nothing is probed, so c_struct is NOT_MEASURED."""
    B, Hq = query.shape[:2]
    ones = torch.ones(B, Hq, device=query.device)
    return Choice(
        keep=geometry.visible.expand(B, Hq, -1, -1),
        c_struct=ones * NOT_MEASURED,
        coverage=ones,
        multiple=ones * NOT_MEASURED,
        route=ones * ROUTE_ALL_BLOCKS,
    )
