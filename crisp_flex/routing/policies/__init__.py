"""One file a policy, each with `select(query, key, geometry, params) -> Choice`; chosen by name.

A policy that reads the values takes them after the key; see `RouteParams.reads_values`.
"""

from __future__ import annotations

from collections.abc import Callable

from crisp_flex.routing.guards import Choice
from crisp_flex.routing.policies import (
    bounded,
    crisp,
    dense,
    flexprefill,
    hybrid,
    minference,
    oracle,
    streaming,
    xattention,
)

SELECT: dict[str, Callable[..., Choice]] = {
    "hybrid": hybrid.select,
    "bounded": bounded.select,
    "crisp": crisp.select,
    "streaming": streaming.select,
    "dense": dense.select,
    "flexprefill": flexprefill.select,
    "minference": minference.select,
    "xattention": xattention.select,
    "oracle": oracle.select,
}
