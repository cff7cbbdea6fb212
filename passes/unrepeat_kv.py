"""Undo repeat_kv: flex_attention takes K and V once per KV head, not once per query head."""

from __future__ import annotations

import sympy
from torch import fx

from crisp_flex.passes.lift_integer import IntegerLifter
from crisp_flex.passes.mask_views import pull_back
from crisp_flex.passes.mutation import storage_of, writes_between
from crisp_flex.passes.node_ops import UnreadError, arguments, op_name, shape_of


def unrepeat_kv(key: fx.Node, value: fx.Node) -> tuple[fx.Node, fx.Node, int]:
    """What key and value repeat G times per head, and G; (key, value, 1) if not both do.

    Before:
        %k5 = getitem(%k, (:, :, None, :, :));  %kx = expand(%k5, B, Hkv, G, Lkv, D)
        %key = reshape(%kx, B, Hkv * G, Lkv, D)
    Result:
        (%k, %v, G)

    Query head h reads KV head h // G, as in `enable_gqa=True`: `repeat(1, G, 1, 1)`, where it reads
    h % Hkv, is left alone.  So is a K or V that is written to between the repeat and its last use.

    Args:
        key: (B, Hq, Lkv, D).
        value: (B, Hq, Lkv, Dv).
    """
    try:
        (plain_key, key_repeats), (plain_value, value_repeats) = _unrepeat(key), _unrepeat(value)
    except UnreadError:
        return key, value, 1
    if key_repeats != value_repeats:
        return key, value, 1
    return plain_key, plain_value, key_repeats


def _unrepeat(repeated: fx.Node) -> tuple[fx.Node, int]:
    copied = repeated
    while op_name(copied) == "same":  # contiguous and the like keep the elements
        (copied,) = copied.all_input_nodes
    if op_name(copied) == "repeat_interleave":
        plain, repeats = _interleaved(copied)
    elif op_name(copied) == "reshape":
        plain, repeats = _expanded(copied)
    else:
        raise UnreadError(f"{copied.name} repeats nothing")
    B, heads, L, D = _sizes(plain, rank=4)
    if repeats < 2 or _sizes(repeated, rank=4) != [B, heads * repeats, L, D]:
        raise UnreadError(f"sizes of {repeated.name}")
    _check_unwritten(plain, copied, repeated)
    return plain, repeats


def _sizes(node: fx.Node, rank: int) -> list[sympy.Expr]:
    sizes = shape_of(node)
    if len(sizes) != rank:
        raise UnreadError(f"rank of {node.name}")
    return sizes


def _interleaved(node: fx.Node) -> tuple[fx.Node, int]:
    """x.repeat_interleave(G, dim=1)."""
    bound = arguments(node, "input", "repeats", "dim", optional=("output_size",))
    if type(bound["repeats"]) is not int or bound["dim"] not in (1, -3):
        raise UnreadError(f"repeats of {node.name}")
    return bound["input"], bound["repeats"]


def _expanded(node: fx.Node) -> tuple[fx.Node, int]:
    """x[:, :, None].expand(B, Hkv, G, L, D), a reshape of which is node."""
    view = node.args[0]
    if not isinstance(view, fx.Node) or op_name(view) != "expand":
        raise UnreadError(f"{node.name} repeats nothing")
    repeats = _sizes(view, rank=5)[2]
    coords = b, h, _, l, d = sympy.symbols("b h g l d", integer=True, nonnegative=True)
    while len(coords) == 5:
        if op_name(view) not in ("expand", "getitem", "reshape"):
            raise UnreadError(f"{view.name} in {node.name}")
        view, coords = pull_back(view, coords, IntegerLifter().integer)
    expected = [
        (size, sympy.Integer(0) if size == 1 else index)
        for size, index in zip(_sizes(view, rank=4), (b, h, l, d), strict=True)
    ]
    # the sizes of node are checked by the caller; a reshape between known sizes has one meaning
    found = [0 if size == 1 else at for (size, _), at in zip(expected, coords, strict=True)]
    if found != [at for _, at in expected] or not repeats.is_Integer:
        raise UnreadError(f"order of heads in {node.name}")
    return view, int(repeats)


def _check_unwritten(plain: fx.Node, copied: fx.Node, repeated: fx.Node) -> None:
    """The repeat was a copy: plain must still hold the same where repeated is last used."""
    order = {node: position for position, node in enumerate(repeated.graph.nodes)}
    last = max((*repeated.users, repeated), key=order.__getitem__)
    storages = {storage_of(node) for node in (plain, copied, repeated)}
    for node, storage in writes_between(copied, last):
        if storage is None or storage in storages:
            raise UnreadError(f"{node.name} writes to {plain.name} or {repeated.name}")
