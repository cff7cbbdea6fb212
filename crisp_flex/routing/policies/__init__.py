"""One file a policy, each with `select(query, key, geometry, params) -> Choice`; chosen by name."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from crisp_flex.routing.geometry import Geometry
from crisp_flex.routing.guards import Choice
from crisp_flex.routing.params import RouteParams
from crisp_flex.routing.policies import (
    crisp,
    dense,
    flexprefill,
    hybrid,
    minference,
    oracle,
    streaming,
    xattention,
)

SELECT: dict[str, Callable[[Tensor, Tensor, Geometry, RouteParams], Choice]] = {
    "hybrid": hybrid.select,
    "crisp": crisp.select,
    "streaming": streaming.select,
    "dense": dense.select,
    "flexprefill": flexprefill.select,
    "minference": minference.select,
    "xattention": xattention.select,
    "oracle": oracle.select,
}
