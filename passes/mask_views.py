"""Where an element of a view comes from: its coordinates, pulled back to what was viewed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import sympy
import torch
from torch import fx

from crisp_flex.passes.mask_formula import Coords
from crisp_flex.passes.node_ops import (
    UnreadError,
    arguments,
    dtype_of,
    op_name,
    shape_of,
    tensor_of,
)

VIEWS = frozenset(
    {"getitem", "index", "expand", "reshape", "transpose", "permute", "t", "mT", "cast", "same"}
)
INDEX_DTYPES = (torch.int32, torch.int64)

ReadIndex = Callable[[object, Coords], sympy.Expr]


def broadcast(node: fx.Node, coords: Coords, shape: Sequence[sympy.Expr]) -> Coords:
    """Coordinates in node of the element at coords in a tensor of the given shape.

    Raises:
        UnreadError: A size is neither 1 nor, provably, the size it is broadcast to.
    """
    sizes = shape_of(node)
    if len(sizes) > len(shape) or len(shape) != len(coords):
        raise UnreadError(f"rank of {node.name}")
    skipped = len(shape) - len(sizes)
    found: list[sympy.Expr] = []
    for size, target, coord in zip(sizes, shape[skipped:], coords[skipped:], strict=True):
        if size != 1 and size != target:
            raise UnreadError(f"sizes of {node.name}")
        found.append(sympy.Integer(0) if size == 1 else coord)
    return tuple(found)


def pull_back(node: fx.Node, coords: Coords, read_index: ReadIndex) -> tuple[fx.Node, Coords]:
    """The tensor that node is a view or a copy of, and the coordinates there.

    Args:
        node: A call of one of VIEWS.
        coords: One coordinate per dimension of node.
        read_index: The integer value of an element of an index tensor.

    Raises:
        UnreadError: The op does more than move elements, or an index may be negative.
    """
    op = op_name(node)
    base = node.args[0] if node.args else None
    if not isinstance(base, fx.Node) or tensor_of(base) is None or len(coords) != _rank(node):
        raise UnreadError(f"base of {node.name}")
    if op in ("getitem", "index"):
        bound = arguments(node, "input", "index")
        index = bound["index"]
        if op == "index" and any(item is None for item in index):  # a whole dimension, in ATen
            raise UnreadError(f"index of {node.name}")
        return base, _index(node, base, coords, index, read_index)
    if op in ("cast", "same"):
        return base, coords
    if op == "expand":
        return base, broadcast(base, coords, shape_of(node))
    if op == "reshape":
        return base, _through_unit_dims(node, base, coords)
    return base, _transposed(node, coords)


def _rank(node: fx.Node) -> int:
    return len(shape_of(node))


def _through_unit_dims(node: fx.Node, base: fx.Node, coords: Coords) -> Coords:
    """A reshape that only adds or drops dimensions of size 1 keeps the others in order."""
    sizes = shape_of(base)
    kept = [(s, c) for s, c in zip(shape_of(node), coords, strict=True) if s != 1]
    if [s for s, _ in kept] != [s for s in sizes if s != 1]:
        raise UnreadError(f"reshape {node.name}")
    rest = iter(kept)
    return tuple(sympy.Integer(0) if s == 1 else next(rest)[1] for s in sizes)


def _transposed(node: fx.Node, coords: Coords) -> Coords:
    rank = len(coords)
    order = list(range(rank))
    op = op_name(node)
    if op == "permute":
        dims = list(node.args[1:])
        if len(dims) == 1 and isinstance(dims[0], (tuple, list)):
            dims = list(dims[0])
        if node.kwargs or not all(type(d) is int for d in dims) or len(dims) != rank:
            raise UnreadError(f"permute {node.name}")
        order = [d % rank for d in dims if isinstance(d, int)]
    else:
        first, second = -2, -1
        if op == "transpose":
            bound = arguments(node, "input", "dim0", "dim1")
            first, second = bound["dim0"], bound["dim1"]
        known = type(first) is int and type(second) is int
        if not known or (op == "t" and rank != 2):
            raise UnreadError(f"transpose {node.name}")
        order[first], order[second] = order[second], order[first]
    found = [sympy.Integer(0)] * rank
    for position, dim in enumerate(order):  # dimension `position` of node is `dim` of base
        found[dim] = coords[position]
    return tuple(found)


def _index(
    node: fx.Node, base: fx.Node, coords: Coords, index: object, read_index: ReadIndex
) -> Coords:
    """Basic indexing, one index tensor per dimension, or a single 1-D index tensor."""
    items = list(index) if isinstance(index, (tuple, list)) else [index]
    sizes = shape_of(base)
    tensors = [item for item in items if isinstance(item, fx.Node) and tensor_of(item) is not None]
    if any(dtype_of(item) not in INDEX_DTYPES for item in tensors):
        raise UnreadError(f"index of {node.name}")
    if tensors and len(tensors) == len(items) == len(sizes):
        at = [read_index(t, broadcast(t, coords, shape_of(node))) for t in tensors]
        return tuple(_not_negative(coord, node) for coord in at)
    if len(tensors) > 1:
        raise UnreadError(f"index of {node.name}")
    if any(item is Ellipsis for item in items):
        dots = next(i for i, item in enumerate(items) if item is Ellipsis)
        taken = sum(item is not None for item in items) - 1
        items[dots : dots + 1] = [slice(None)] * (len(sizes) - taken)
    items += [slice(None)] * (len(sizes) - sum(item is not None for item in items))
    if sum(item is not None for item in items) != len(sizes):
        raise UnreadError(f"index of {node.name}")
    found: list[sympy.Expr] = []
    results = iter(zip(coords, shape_of(node), strict=True))  # consumed left to right
    for item in items:
        if item is None:
            next(results)
        elif isinstance(item, slice):
            coord, size = next(results)
            found.append(_sliced(item, coord, size, sizes[len(found)], node, read_index))
        elif item in tensors:
            if _rank(item) != 1:
                raise UnreadError(f"index of {node.name}")
            found.append(_not_negative(read_index(item, (next(results)[0],)), node))
        else:
            at_item = read_index(item, ())
            if at_item.is_negative:
                at_item = at_item + sizes[len(found)]
            found.append(_not_negative(at_item, node))
    return tuple(found)


def _sliced(
    item: slice,
    coord: sympy.Expr,
    size: sympy.Expr,
    base_size: sympy.Expr,
    node: fx.Node,
    read_index: ReadIndex,
) -> sympy.Expr:
    """The coordinate in the base of coord in base[item], which has the given size."""
    step = 1 if item.step is None else item.step
    if type(step) is not int or step < 1:
        raise UnreadError(f"step of {node.name}")
    if item.start is None:
        return coord * step
    start = read_index(item.start, ())
    if not start.is_nonnegative:
        # x[-n:] starts where its size says, however the start was clamped
        if item.stop is not None or step != 1:
            raise UnreadError(f"start of {node.name}")
        start = base_size - size
    return coord * step + start


def _not_negative(coord: sympy.Expr, node: fx.Node) -> sympy.Expr:
    """coord itself; an index that may be negative would count from the end."""
    if not coord.is_nonnegative:
        raise UnreadError(f"sign of an index of {node.name}")
    return coord
