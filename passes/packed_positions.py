"""Packed documents by positions alone: where their ids are equal, positions count as indices do.

Transformers ends a document where a position is not the one before plus one. The ids are then
`cumsum(diff(p) != 1)`, and the mask is `p[k] <= p[q]` and `ids[q] == ids[k]`. Equal ids say that
each step between q and k is 1, so that p[k] - p[q] = k - q (for positions that do not wrap around):
the mask is `k <= q` and `ids[q] == ids[k]`.
"""

from __future__ import annotations

import sympy
from sympy.core.function import AppliedUndef
from torch import fx

from crisp_flex.passes.lift_element import ElementLifter, is_zero_or_one
from crisp_flex.passes.mask_formula import Compare, Coords, K, Q
from crisp_flex.passes.mask_spec import SameIds
from crisp_flex.passes.node_ops import UnreadError, arguments, op_name, shape_of


def by_index(order: Compare, same: SameIds, lifter: ElementLifter) -> Compare | None:
    """What order says where same holds, in indices instead of positions.

    Args:
        order: A comparison "<=" of loaded positions: `p[b, k] <= p[b, q]`, of a window likewise.
        same: The ids that are equal for q and k.
        lifter: That lifted both.

    Returns:
        The comparison without loads; None where same are not the ids of those positions.
    """
    try:
        at_key = _position(same, lifter)
    except UnreadError:
        return None
    gap = sympy.expand(order.left - order.right)
    ahead = at_key - at_key.xreplace({K: Q})
    for sign in (1, -1):
        rest = sympy.expand(gap + sign * (K - Q - ahead))
        if not rest.has(AppliedUndef):
            return Compare("<=", rest, sympy.Integer(0), order.origin)
    return None


def _position(same: SameIds, lifter: ElementLifter) -> sympy.Expr:
    """p at key k, where same are ids cumsum(diff(p) != 1) of one row.

    Raises:
        UnreadError: They are of another form.
    """
    of_key = same.of_key
    if not isinstance(of_key, AppliedUndef) or same.of_query != of_key.xreplace({K: Q}):
        raise UnreadError(f"ids {of_key}")
    steps, coords = _steps(*_loaded(of_key, lifter), lifter)
    bound = arguments(steps, "input", "prepend", optional=("dim",))
    along = bound.get("dim", -1) in (-1, len(coords) - 1)
    # by position, the second argument would be how often to take differences
    once = op_name(steps) == "diff" and len(steps.args) == 1
    if not (once and along and shape_of(bound["prepend"])[-1] == 1):
        raise UnreadError(f"diff {steps.name}")
    return lifter.integer(bound["input"], coords)


def _steps(ids: fx.Node, coords: Coords, lifter: ElementLifter) -> tuple[fx.Node, Coords]:
    """The node x, and the coordinates in it, where ids is cumsum(x != 1) at coords.

    Raises:
        UnreadError: ids is not of that form.
    """
    bound = arguments(ids, "input", "dim", optional=("dtype",))
    counts = op_name(ids) == "cumsum" and bound["dim"] in (-1, len(coords) - 1)
    # a sum of other numbers may come back to a value that it had
    if counts and is_zero_or_one(bound["input"]):
        match lifter.truth(bound["input"], coords):
            case (Compare("!=", left, right),):
                loads = (left - right).atoms(AppliedUndef)
                for load in loads:
                    if left - right in (load - 1, 1 - load):
                        return _loaded(load, lifter)
    raise UnreadError(f"ids {ids.name}")


def _loaded(load: sympy.Expr, lifter: ElementLifter) -> tuple[fx.Node, Coords]:
    """The tensor and the coordinates of a loaded element of a row: only the last one runs with k.

    Raises:
        UnreadError: The coordinates are others.
    """
    *row, column = load.args
    if column != K or any(x.has(K) for x in row):
        raise UnreadError(f"coordinates of {load}")
    return lifter.sources[str(load.func)], load.args
