"""Follow one element of an additive mask back through its producers: 0 where visible, else hidden.

`where(causal, 0, -inf)` says what the boolean mask `causal` says; any other number is a bias, which
no formula here can say.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from crisp_flex.passes.lift_element import ElementLifter
from crisp_flex.passes.mask_formula import (
    FALSE,
    TRUE,
    Coords,
    Formula,
    compare,
    conjoin,
    disjoin,
    negate,
)
from crisp_flex.passes.mask_views import VIEWS, broadcast, pull_back
from crisp_flex.passes.node_ops import (
    UnreadError,
    arguments,
    dtype_of,
    op_name,
    shape_of,
    tensor_of,
    value_of,
)


class BiasLifter(ElementLifter):
    """Lifts the elements of additive masks.

    Attributes:
        finite: A hidden pair may have the dtype's minimum where others have -inf. The two differ in
            a row that sees nothing: the minimum gives it equal weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self.finite = False

    def visible(self, arg: object, coords: Coords, dtype: torch.dtype) -> Formula:
        """The statement that the element of arg is 0; where it does not hold, the pair is hidden.

        Args:
            arg: A tensor node or a number.
            coords: Of the element.
            dtype: In which the number is added.

        Raises:
            UnreadError: The element may be another number.
        """
        if isinstance(arg, (bool, int, float)):
            return self._number(float(arg), dtype)
        if not isinstance(arg, fx.Node) or tensor_of(arg) is None:
            raise UnreadError(f"operand {arg}")
        with self.descent():
            return self._visible(arg, coords)

    def _visible(self, node: fx.Node, coords: Coords) -> Formula:
        op, dtype = op_name(node), dtype_of(node)
        if not dtype.is_floating_point:
            raise UnreadError(f"{node.name} is {dtype}")
        if op in VIEWS:
            base, base_coords = pull_back(node, coords, self.integer)
            found = self.visible(base, base_coords, dtype)
            if dtype_of(base) != dtype and self.finite:
                raise UnreadError("a cast of the minimum")
            return found
        if op == "where":
            bound = arguments(node, "condition", "input", "other")
            condition = self._at(node, bound["condition"], coords)
            yes, no = (self._part(node, bound[name], coords) for name in ("input", "other"))
            hidden = negate(condition, None)
            return conjoin(disjoin(hidden, yes, None), disjoin(condition, no, None))
        if op == "masked_fill":
            bound = arguments(node, "input", "mask", "value")
            condition = self._at(node, bound["mask"], coords)
            kept, filled = (self._part(node, bound[name], coords) for name in ("input", "value"))
            hidden = negate(condition, None)
            return conjoin(disjoin(condition, kept, None), disjoin(hidden, filled, None))
        if op == "add":
            parts = arguments(node, "input", "other").values()
            return conjoin(*(self._part(node, part, coords) for part in parts))
        if op in ("tril", "triu"):
            bound = arguments(node, "input", optional=("diagonal",))
            edge = coords[-2] + self.integer(bound.get("diagonal", 0), ())
            zeroed = compare("gt" if op == "tril" else "lt", coords[-1], edge, None)
            return disjoin(zeroed, self.visible(bound["input"], coords, dtype), None)
        return self._number(_filled_with(node), dtype)

    def _part(self, node: fx.Node, operand: object, coords: Coords) -> Formula:
        """`visible` of an operand that is broadcast to node."""
        if isinstance(operand, fx.Node) and tensor_of(operand) is not None:
            coords = broadcast(operand, coords, shape_of(node))
            if dtype_of(operand) != dtype_of(node):
                raise UnreadError(f"{operand.name} is {dtype_of(operand)}")
        return self.visible(operand, coords, dtype_of(node))

    def _number(self, number: float, dtype: torch.dtype) -> Formula:
        if number == 0:
            return TRUE
        if number == -math.inf:
            return FALSE
        if number == torch.finfo(dtype).min:
            self.finite = True
            return FALSE
        raise UnreadError(f"a bias of {number}")


def _filled_with(node: fx.Node) -> float:
    """The number that all elements of node are."""
    op = op_name(node)
    if op in ("zeros", "ones"):
        return float(op == "ones")
    value: object = None
    if op in ("full", "full_like"):
        value = node.kwargs.get("fill_value", node.args[-1] if len(node.args) > 1 else None)
    elif op == "scalar" and node.args:
        value = node.args[0]
    value = value_of(value)
    if isinstance(value, (bool, int, float)):
        return float(value)
    raise UnreadError(f"no rule for {node.name}")
