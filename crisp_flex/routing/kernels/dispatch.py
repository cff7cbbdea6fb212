"""The kernels behind crisp_flex::route on CUDA: which calls they take, the route of a policy."""

from __future__ import annotations

from torch import Tensor

from crisp_flex.routing.kernels import bounded, unaudited
from crisp_flex.routing.kernels import route as audited
from crisp_flex.routing.params import RouteParams


def supports(query: Tensor, key: Tensor, params: RouteParams) -> bool:
    """Whether the kernels take this call; the reference takes all."""
    policies = (audited, bounded, unaudited)
    return any(policy.supports(query, key, params) for policy in policies)


def route(
    query: Tensor,
    key: Tensor,
    key_valid: Tensor | None,
    params: RouteParams,
    q_offset: Tensor | None = None,
    value: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The route of params.policy; see reference.route, unused slots of the lists undefined."""
    if params.policy == "bounded":
        return bounded.route(query, key, key_valid, params, q_offset, value)
    if params.policy == "hybrid":
        return audited.route(query, key, key_valid, params, q_offset)
    return unaudited.route(query, key, key_valid, params, q_offset)
