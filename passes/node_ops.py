"""The vocabulary of the passes: which operation a node calls, on which arguments and values."""

from __future__ import annotations

import operator
from typing import Any

import sympy
import torch
from torch import fx

from crisp_flex import torch_internals

# One name for the many spellings of an operation: function of torch, of operator, method, dunder.
# Reflected forms (rsub) and forms that round (true division) are left out on purpose.
_SPELLINGS: dict[str, tuple[str, ...]] = {
    "add": ("add", "__add__", "__radd__"),
    "sub": ("sub", "subtract", "__sub__"),
    "mul": ("mul", "multiply", "__mul__", "__rmul__"),
    "floordiv": ("floordiv", "floor_divide", "__floordiv__"),
    "le": ("le", "less_equal", "__le__"),
    "lt": ("lt", "less", "__lt__"),
    "ge": ("ge", "greater_equal", "__ge__"),
    "gt": ("gt", "greater", "__gt__"),
    "eq": ("eq", "__eq__"),
    "ne": ("ne", "not_equal", "__ne__"),
    "bitand": ("and_", "bitwise_and", "__and__", "__rand__"),
    "bitor": ("or_", "bitwise_or", "__or__", "__ror__"),
    "and": ("logical_and",),
    "or": ("logical_or",),
    "invert": ("invert", "inv", "bitwise_not", "__invert__"),
    "not": ("logical_not",),
    "arange": ("arange",),
    "ones": ("ones", "ones_like", "new_ones"),
    "zeros": ("zeros", "zeros_like", "new_zeros"),
    "full": ("full",),
    "full_like": ("full_like", "new_full"),
    "scalar": ("tensor", "scalar_tensor"),
    "where": ("where",),
    "masked_fill": ("masked_fill",),
    "tril": ("tril",),
    "triu": ("triu",),
    "diff": ("diff",),
    "cumsum": ("cumsum",),
    "getitem": ("getitem", "__getitem__"),
    "expand": ("expand", "expand_as", "broadcast_to"),
    "reshape": ("view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten"),
    "transpose": ("transpose", "swapaxes", "swapdims"),
    "permute": ("permute",),
    "t": ("t",),
    "cast": ("to", "type", "type_as", "bool", "int", "long", "float", "half", "bfloat16"),
    "same": ("contiguous", "clone", "detach", "cpu", "cuda", "alias"),
    "repeat_interleave": ("repeat_interleave",),
    "sym_max": ("sym_max",),
    "sym_min": ("sym_min",),
}
_IN_PLACE: dict[str, tuple[str, ...]] = {
    "add": ("iadd", "__iadd__", "add_"),
    "sub": ("isub", "__isub__", "sub_"),
    "mul": ("imul", "__imul__", "mul_"),
    "bitand": ("iand", "__iand__", "bitwise_and_"),
    "bitor": ("ior", "__ior__", "bitwise_or_"),
    "and": ("logical_and_",),
    "or": ("logical_or_",),
    "masked_fill": ("masked_fill_",),
}


def _by_target(table: dict[str, tuple[str, ...]]) -> dict[object, str]:
    """Method names and the function objects of torch and operator, each with its one name."""
    found: dict[object, str] = {}
    for name, spellings in table.items():
        for spelling in spellings:
            found[spelling] = name
            for home in (torch, operator):
                if callable(function := getattr(home, spelling, None)):
                    found[function] = name
    return found


_NAMES = _by_target(_SPELLINGS)
_NAMES |= dict.fromkeys(torch_internals.PADS, "pad")
_NAMES[torch.ops.aten.index] = "index"
_NAMES[torch.ops.aten.index.Tensor] = "index"
_NAMES[torch_internals.ADD_BATCH_DIM] = "add_batch_dim"
_NAMES[torch_internals.REMOVE_BATCH_DIM] = "remove_batch_dim"
_IN_PLACE_NAMES = _by_target(_IN_PLACE)


class UnreadError(Exception):
    """A part of the graph that no rule reads; it never leaves the passes."""


def op_name(node: fx.Node) -> str | None:
    """The one name of the operation that node calls, None where it is not in the vocabulary."""
    return _lookup(node, _NAMES) or in_place_name(node)


def in_place_name(node: fx.Node) -> str | None:
    """As op_name, for the operations that write to their first argument and return it."""
    return _lookup(node, _IN_PLACE_NAMES)


def _lookup(node: fx.Node, names: dict[object, str]) -> str | None:
    if node.op == "call_method":
        return names.get(node.target)
    if node.op != "call_function" or isinstance(node.target, str):
        return None
    if node.target is getattr and len(node.args) == 2 and names is _NAMES:
        return {"T": "t", "mT": "mT"}.get(str(node.args[1]))
    return names.get(node.target)


def arguments(node: fx.Node, *required: str, optional: tuple[str, ...] = ()) -> dict[str, Any]:
    """The arguments of node by the given names, in their order; optional ones may be missing.

    Raises:
        UnreadError: An argument was passed that has no name here, so the rule does not cover it.
    """
    names = (*required, *optional)
    bound = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    if len(node.args) > len(names) or not set(required) <= bound.keys() <= set(names):
        raise UnreadError(f"arguments of {node.name}")
    return bound


def value_of(arg: object) -> object:
    """The example value behind a node; anything else is its own value."""
    if isinstance(arg, fx.Node):
        return arg.meta.get("example_value", arg.meta.get("val"))
    return arg


def tensor_of(arg: object) -> torch.Tensor | None:
    """The fake tensor behind a node, None where the node is not a tensor."""
    value = value_of(arg)
    return value if isinstance(value, torch.Tensor) else None


def size_expr(size: int | torch.SymInt) -> sympy.Expr:
    """A size, or any int, as a sympy integer expression; no guard is made."""
    expr = torch_internals.size_expr(size)
    if expr is None:
        raise UnreadError(f"size {size}")
    return expr


def shape_of(node: object) -> list[sympy.Expr]:
    """The sizes of a tensor node."""
    tensor = tensor_of(node)
    if tensor is None:
        raise UnreadError(f"no shape for {node}")
    return [size_expr(size) for size in tensor.shape]


def dtype_of(node: object) -> torch.dtype:
    """The dtype of a tensor node."""
    tensor = tensor_of(node)
    if tensor is None:
        raise UnreadError(f"no dtype for {node}")
    return tensor.dtype


def nodes_in(arg: fx.node.Argument) -> list[fx.Node]:
    """The nodes of an argument, through tuples, lists, dicts and slices."""
    found: list[fx.Node] = []
    fx.node.map_arg(arg, found.append)
    return found
