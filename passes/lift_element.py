"""Follow one element of a mask back through its producers, to a formula of (b, h, q, k)."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from crisp_flex.passes.lift_integer import IntegerLifter
from crisp_flex.passes.mask_formula import (
    FALSE,
    Coords,
    Element,
    Formula,
    Load,
    Unread,
    compare,
    compare_numbers,
    conjoin,
    disjoin,
    literal,
    negate,
)
from crisp_flex.passes.mask_views import INDEX_DTYPES, VIEWS, broadcast, pull_back
from crisp_flex.passes.node_ops import (
    UnreadError,
    arguments,
    dtype_of,
    op_name,
    shape_of,
    tensor_of,
)

_COMPARISONS = frozenset({"le", "lt", "ge", "gt", "eq", "ne"})


class ElementLifter(IntegerLifter):
    """Lifts elements of the graph's tensors to statements about b, h, q and k."""

    def truth(self, arg: object, coords: Coords) -> Formula:
        """The statement that the element of arg (a tensor node or a number) is not zero.

        What no rule covers becomes one statement about that very element.
        """
        if isinstance(arg, (bool, int, float)):
            return literal(bool(arg))
        if not isinstance(arg, fx.Node) or tensor_of(arg) is None:
            raise UnreadError(f"operand {arg}")
        with self.descent():
            try:
                return self._truth(arg, coords)
            except UnreadError as error:
                if self.under_vmap(arg):
                    return (Unread(f"{arg.name}: {error}"),)
                return (Load(Element(arg, coords)),)

    def _truth(self, node: fx.Node, coords: Coords) -> Formula:
        op = op_name(node)
        is_bool = dtype_of(node) == torch.bool
        if op == "add_batch_dim" or op == "remove_batch_dim":
            return self.through_vmap(node, coords, self.truth)
        if op in VIEWS:
            base, base_coords = pull_back(node, coords, self.integer)
            if not (_keeps_zero(dtype_of(base), dtype_of(node)) or is_zero_or_one(base)):
                raise UnreadError("a cast that may round to zero")
            return self.truth(base, base_coords)
        if op in ("and", "or") or (op in ("bitand", "bitor", "mul") and is_bool):
            left, right = self._operands(node)
            both = self._at(node, left, coords), self._at(node, right, coords)
            if op in ("or", "bitor"):
                return disjoin(*both, self._origin(node, coords))
            return conjoin(*both)
        if op == "not" or (op == "invert" and is_bool):
            (operand,) = arguments(node, "input").values()
            return negate(self.truth(operand, coords), self._origin(node, coords))
        if op in _COMPARISONS:
            return self._comparison(op, node, coords)
        if op in ("tril", "triu"):
            return self._triangle(op, node, coords)
        if op == "pad":
            return self._padded(node, coords)
        if (number := self.fill_value(node)) is not None:
            return literal(bool(number))
        raise UnreadError(f"no rule for {node.name}")

    def is_zero(self, node: fx.Node, coords: Coords) -> bool:
        """Whether the element is zero whatever its coordinates are."""
        return self.truth(node, coords) == FALSE

    def _operands(self, node: fx.Node) -> tuple[Any, Any]:
        bound = arguments(node, "input", "other")
        return bound["input"], bound["other"]

    def _origin(self, node: fx.Node, coords: Coords) -> Element | None:
        return None if self.under_vmap(node) else Element(node, coords)

    def _at(self, node: fx.Node, operand: object, coords: Coords) -> Formula:
        """The truth of an operand of a broadcasting op, at the element coords of its result."""
        if isinstance(operand, fx.Node) and tensor_of(operand) is not None:
            coords = broadcast(operand, coords, shape_of(node))
        return self.truth(operand, coords)

    def _comparison(self, op: str, node: fx.Node, coords: Coords) -> Formula:
        left, right = self._operands(node)
        origin = self._origin(node, coords)
        tensor = tensor_of(left)
        if tensor is not None and isinstance(right, (bool, int, float)):
            if is_zero_or_one(left):
                at_one, at_zero = (compare_numbers(op, x, right) for x in (1, 0))
                if at_one == at_zero:
                    return literal(at_one)
                truth = self._at(node, left, coords)
                return truth if at_one else negate(truth, origin)
            if right == 0 and op in ("eq", "ne") and tensor.dtype not in INDEX_DTYPES:
                truth = self._at(node, left, coords)
                return truth if op == "ne" else negate(truth, origin)
        numbers = [self.operand(x, coords, shape_of(node)) for x in (left, right)]
        return compare(op, numbers[0], numbers[1], origin)

    def _triangle(self, op: str, node: fx.Node, coords: Coords) -> Formula:
        """tril keeps the elements with column <= row + diagonal, triu those with column >= it."""
        bound = arguments(node, "input", optional=("diagonal",))
        diagonal = self.integer(bound.get("diagonal", 0), ())
        row, column = coords[-2], coords[-1]
        kept = compare("le" if op == "tril" else "ge", column, row + diagonal, None)
        return conjoin(kept, self.truth(bound["input"], coords))

    def _padded(self, node: fx.Node, coords: Coords) -> Formula:
        """False appended on the last dimension: the element is within the input, and true there."""
        bound = arguments(node, "input", "pad", optional=("mode", "value"))
        base, pad = bound["input"], bound["pad"]
        appends = isinstance(pad, (tuple, list)) and len(pad) == 2 and pad[0] == 0
        if not appends or bound.get("mode", "constant") != "constant" or bound.get("value"):
            raise UnreadError(f"pad {node.name}")
        within = compare("lt", coords[-1], shape_of(base)[-1], None)
        return conjoin(within, self.truth(base, coords))


def _keeps_zero(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether a cast maps zero, and nothing else, to zero."""
    if source == target or torch.bool in (source, target):
        return True
    return source in INDEX_DTYPES and target == torch.int64


def is_zero_or_one(node: fx.Node) -> bool:
    """Whether every element is provably 0 or 1."""
    op = op_name(node)
    if dtype_of(node) == torch.bool or op in ("ones", "zeros"):
        return True
    base = node.args[0] if node.args else None
    if op in ("tril", "triu") or op in VIEWS:
        return isinstance(base, fx.Node) and tensor_of(base) is not None and is_zero_or_one(base)
    return False
