"""Follow one element of an integer tensor back to an expression of (b, h, q, k) and of loads."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import sympy
import torch
from sympy.core.function import AppliedUndef
from torch import fx

from crisp_flex.passes.dead_nodes import ancestors
from crisp_flex.passes.mask_views import INDEX_DTYPES, VIEWS, broadcast, pull_back
from crisp_flex.passes.node_ops import (
    UnreadError,
    arguments,
    dtype_of,
    op_name,
    shape_of,
    size_expr,
    tensor_of,
    value_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from crisp_flex.passes.mask_formula import Coords

T = TypeVar("T")

# Nodes on one path, and steps in all; a mask of Transformers takes about 20 and 60.
_DEEPEST, _MOST_STEPS = 100, 10_000
# Constants beyond this could wrap around when lengths are added to them.
_LARGEST = {torch.int32: 2**30, torch.int64: 2**62}


class IntegerLifter:
    """Lifts integer elements.

    Attributes:
        sources: The tensor behind each symbol and function that stands for a loaded element.
    """

    def __init__(self) -> None:
        self.sources: dict[str, fx.Node] = {}
        self._levels: dict[Any, sympy.Expr] = {}
        self._under_vmap: dict[fx.Node, bool] = {}
        self._depth = 0
        self._steps = 0

    @contextmanager
    def descent(self) -> Iterator[None]:
        """One step towards the producers; far too many of them end the reading."""
        if self._depth >= _DEEPEST or self._steps >= _MOST_STEPS:
            raise UnreadError("built in too many steps")
        self._depth += 1
        self._steps += 1
        try:
            yield
        finally:
            self._depth -= 1

    def operand(self, arg: object, coords: Coords, shape: Sequence[sympy.Expr]) -> sympy.Expr:
        """The integer value of an operand that is broadcast to shape, at coords."""
        if isinstance(arg, fx.Node) and tensor_of(arg) is not None:
            return self.integer(arg, broadcast(arg, coords, shape))
        return self.integer(arg, ())

    def integer(self, arg: object, coords: Coords) -> sympy.Expr:
        """The value of arg: an int, a SymInt, or the element at coords of an int32 or int64 tensor.

        An element that no rule computes is a load: a function of its coordinates, named in sources.

        Raises:
            UnreadError: arg is not an integer of that kind.
        """
        value = value_of(arg)
        if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
            return size_expr(value)
        if not isinstance(arg, fx.Node) or not isinstance(value, torch.Tensor):
            raise UnreadError(f"operand {arg}")
        if value.dtype not in INDEX_DTYPES:
            raise UnreadError(f"{arg.name} is {value.dtype}")
        with self.descent():
            try:
                found = self._integer(arg, coords)
                if all(abs(n) < _LARGEST[value.dtype] for n in found.atoms(sympy.Integer)):
                    return found
            except UnreadError:
                pass  # its value is still there to be loaded
            return self._load(arg, coords)

    def _integer(self, node: fx.Node, coords: Coords) -> sympy.Expr:
        op = op_name(node)
        if op == "add_batch_dim" or op == "remove_batch_dim":
            return self.through_vmap(node, coords, self.integer)
        if op in VIEWS:
            base, base_coords = pull_back(node, coords, self.integer)
            found = self.integer(base, base_coords)
            narrows = dtype_of(base) == torch.int64 and dtype_of(node) == torch.int32
            if narrows and self._has_loads(found):
                raise UnreadError("a loaded value is narrowed")
            return found
        if op in ("add", "sub", "mul", "floordiv"):
            return self._arithmetic(op, node, coords)
        if op == "arange":
            return self._arange(node, coords)
        if op == "diff":
            return self._constant_diff(node, coords)
        if op == "cumsum":
            return self._empty_sum(node, coords)
        if (number := self.fill_value(node)) is not None:
            return sympy.Integer(number)
        raise UnreadError(f"no rule for {node.name}")

    def _arithmetic(self, op: str, node: fx.Node, coords: Coords) -> sympy.Expr:
        bound = arguments(node, "input", "other")
        shape = shape_of(node)
        left, right = (self.operand(bound[x], coords, shape) for x in ("input", "other"))
        if op == "add":
            return left + right
        if op == "sub":
            return left - right
        if op == "mul" and dtype_of(node) == torch.int64:
            return left * right
        if op == "floordiv" and right.is_positive:
            return sympy.floor(left / right)
        raise UnreadError(f"arithmetic {node.name}")

    def _arange(self, node: fx.Node, coords: Coords) -> sympy.Expr:
        bounds = {name: x for name, x in node.kwargs.items() if name in ("start", "end", "step")}
        named = dict(zip(("start", "end", "step"), node.args, strict=False)) | bounds
        start = 0 if "end" not in named else named.get("start", 0)
        return self.integer(start, ()) + coords[0] * self.integer(named.get("step", 1), ())

    def _constant_diff(self, node: fx.Node, coords: Coords) -> sympy.Expr:
        """diff(x, prepend=p) where all steps, the one from p included, are the same number."""
        bound = arguments(node, "input", "prepend", optional=("dim",))
        x, prepend = bound["input"], bound["prepend"]
        last = bound.get("dim", -1) in (-1, len(coords) - 1)
        if len(node.args) > 1 or not last or shape_of(prepend)[-1] != 1:
            raise UnreadError(f"diff {node.name}")
        first = (*coords[:-1], sympy.Integer(0))
        here, before = self.integer(x, coords), self.integer(x, (*coords[:-1], coords[-1] - 1))
        step = sympy.expand(here - before)
        first_step = sympy.expand(self.integer(x, first) - self.integer(prepend, first))
        if not step.is_Integer or step != first_step:
            raise UnreadError(f"diff {node.name}")
        return step

    def _empty_sum(self, node: fx.Node, coords: Coords) -> sympy.Expr:
        """cumsum of a tensor that is zero everywhere."""
        bound = arguments(node, "input", "dim", optional=("dtype",))
        if type(bound["dim"]) is not int:  # a symbol, where the model has it from outside
            raise UnreadError(f"cumsum {node.name}")
        anywhere = sympy.Dummy("i", integer=True, nonnegative=True)
        summed = list(coords)
        summed[bound["dim"]] = anywhere
        if not self.is_zero(bound["input"], tuple(summed)):
            raise UnreadError(f"cumsum {node.name}")
        return sympy.Integer(0)

    def is_zero(self, node: fx.Node, coords: Coords) -> bool:
        """Whether the element is zero whatever its coordinates are."""
        return bool(self.integer(node, coords) == 0)

    def fill_value(self, node: fx.Node) -> int | None:
        """The number that node fills its result with, None if it is not such a node."""
        op = op_name(node)
        if op in ("ones", "zeros"):
            return 1 if op == "ones" else 0
        if op in ("full", "full_like"):
            value = node.kwargs.get("fill_value", node.args[-1] if len(node.args) > 1 else None)
            if isinstance(value, (bool, int)) and abs(value) < 128:  # in every dtype a number
                return value
        return None

    def through_vmap(self, node: fx.Node, coords: Coords, lift: Callable[[object, Coords], T]) -> T:
        """vmap of torch.func: a dimension that is put away under a level, and brought back."""
        if op_name(node) == "add_batch_dim":  # (x, in_dim, level)
            if len(node.args) != 3:
                raise UnreadError(f"vmap {node.name}")
            x, dim, level = node.args
            if type(dim) is not int or dim < 0 or level not in self._levels:
                raise UnreadError(f"vmap {node.name}")
            return lift(x, (*coords[:dim], self._levels[level], *coords[dim:]))
        if len(node.args) != 4:
            raise UnreadError(f"vmap {node.name}")
        x, level, _, dim = node.args  # (x, level, size, out_dim)
        if type(dim) is not int or dim < 0 or level in self._levels:
            raise UnreadError(f"vmap {node.name}")
        self._levels[level] = coords[dim]
        try:
            return lift(x, (*coords[:dim], *coords[dim + 1 :]))
        finally:
            del self._levels[level]

    def under_vmap(self, node: fx.Node) -> bool:
        """Whether node may hold a dimension that its shape does not show: it can't be loaded."""
        if node not in self._under_vmap:
            self._under_vmap[node] = any(op_name(x) == "add_batch_dim" for x in ancestors(node))
        return self._under_vmap[node]

    def _load(self, node: fx.Node, coords: Coords) -> sympy.Expr:
        if self.under_vmap(node):
            raise UnreadError(f"{node.name} under vmap")
        name = f"value_of_{node.name}"
        self.sources[name] = node
        if not coords:
            return sympy.Symbol(name, integer=True)
        return sympy.Function(name, integer=True)(*coords)

    def _has_loads(self, expr: sympy.Expr) -> bool:
        """Whether expr depends on an element of a tensor, of which the size is not known."""
        names = {str(atom) for atom in expr.free_symbols}
        if not names.isdisjoint(self.sources):
            return True
        return len(expr.atoms(AppliedUndef)) > 0
