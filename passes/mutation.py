"""Which nodes write to a tensor in place, and whether that spoils the reading of a mask."""

from __future__ import annotations

import inspect
import operator
from dataclasses import replace
from types import FunctionType
from typing import TYPE_CHECKING

from crisp_flex import torch_internals
from crisp_flex.passes.dead_nodes import ancestors
from crisp_flex.passes.node_ops import in_place_name, nodes_in, tensor_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import fx

    from crisp_flex.passes.mask_spec import MaskSpec

_AUGMENTED = ["add", "and", "concat", "floordiv", "lshift", "matmul", "mod", "mul", "or", "pow"]
_AUGMENTED += ["rshift", "sub", "truediv", "xor"]
# operator.and_ and the like end in an underscore because the words are taken
_PURE_NAMES = (operator.and_, operator.or_, operator.not_, operator.is_)
_WRITE_FIRST = frozenset(
    {operator.setitem, operator.delitem, "__setitem__", "__delitem__"}
    | {getattr(operator, f"i{name}") for name in _AUGMENTED}
    | {f"__i{name}__" for name in _AUGMENTED}
)


def written_nodes(node: fx.Node) -> list[fx.Node]:
    """The tensor nodes that node may write to in place; where in doubt, all of its inputs."""
    if node.op not in ("call_function", "call_method", "call_module"):
        return []
    target = node.target
    written = nodes_in(node.kwargs.get("out"))
    if isinstance(target, (torch_internals.OpOverload, torch_internals.OpOverloadPacket)):
        for position, argument in torch_internals.written_arguments(target):
            written += nodes_in(node.kwargs.get(argument))
            if position is not None:
                written += nodes_in(node.args[position : position + 1])
    elif node.op == "call_module" or isinstance(target, torch_internals.HigherOrderOperator):
        if target is not torch_internals.FLEX_ATTENTION:
            written += node.all_input_nodes
    elif isinstance(target, FunctionType):
        if target.__module__.split(".")[0] != "torch":
            written += node.all_input_nodes
        elif _inplace_flag(node, target):
            written += nodes_in(node.args[:1])
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    underscored = name.endswith("_") and not name.endswith("__")
    if target in _WRITE_FIRST or (underscored and target not in _PURE_NAMES):
        written += nodes_in(node.args[:1]) or node.all_input_nodes
    return [x for x in written if tensor_of(x) is not None]


def _inplace_flag(node: fx.Node, target: FunctionType) -> bool:
    """Whether a functional was called with inplace=True, by name or by position."""
    names = list(inspect.signature(target).parameters)
    if "inplace" not in names:
        return bool(node.kwargs.get("inplace"))
    position = names.index("inplace")
    flag = node.args[position] if position < len(node.args) else node.kwargs.get("inplace")
    return bool(flag)


def storage_of(node: fx.Node) -> int | None:
    """The identity of the storage behind a tensor node: equal for views of one tensor."""
    tensor = tensor_of(node)
    return None if tensor is None else torch_internals.storage_id(tensor)


def writes_between(first: fx.Node, last: fx.Node) -> Iterator[tuple[fx.Node, int | None]]:
    """Each write behind first, up to and with last in graph order: the node, the storage."""
    node = first
    while node is not last and node.op != "output":
        node = node.next
        for written in written_nodes(node):
            yield node, storage_of(written)


def in_place_conflict(mask: fx.Node) -> str | None:
    """Why in-place writes forbid to read mask from the nodes that built it, None if they don't.

    A tensor that has no other reader may be built up in place (`rows += 1`), as may anything after
    mask that is not mask itself.
    """
    family = ancestors(mask)
    storages = {storage_of(node) for node in family} - {None}
    own = storage_of(mask)
    if own is None:
        return f"mask {mask.name} has no storage of its own"
    first = next(iter(mask.graph.nodes))
    for node, storage in writes_between(first, mask):
        if storage is None or (storage in storages and not _builds_up(node, storage, family)):
            return f"{node.name} writes to what mask {mask.name} is built from"
    for node, storage in writes_between(mask, next(iter(reversed(mask.graph.nodes)))):
        if storage is None or storage == own:
            return f"{node.name} writes to mask {mask.name}"
    return None


def _builds_up(node: fx.Node, storage: int, family: set[fx.Node]) -> bool:
    """Whether node is the next of a chain of in-place ops on a new tensor nothing else reads."""
    if node not in family or in_place_name(node) is None:
        return False
    for holder in node.graph.nodes:
        if holder is node:
            return True
        if storage_of(holder) == storage and (
            len(holder.users) != 1 or holder.op in ("placeholder", "get_attr")
        ):
            return False
    return False


def written_later(spec: MaskSpec, mask: fx.Node) -> MaskSpec:
    """spec with `volatile` filled in: its tensors that are written to behind mask."""
    sources = [load.source for load in spec.padding] + [node for _, node in spec.symbols]
    sources += [node for same in spec.same for _, node in same.sources]
    storages = {storage_of(node) for node in sources} - {None}
    if not storages:
        return spec
    last = next(iter(reversed(mask.graph.nodes)))
    written = {storage for _, storage in writes_between(mask, last)} & storages
    return replace(spec, volatile=tuple(n for n in sources if storage_of(n) in written))
