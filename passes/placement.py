"""Where the queries of a site stand among its keys: what the rewrite needs of a mask, or why not.

A reading (`MaskSpec`) says where query 0 stands as an expression. The routing knows one case best:
the last query sees the last key. A site is brought into that form by cutting off the keys that
nobody sees; a position that only the run of the graph gives is handed on.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy
import torch
from torch import fx

from crisp_flex import torch_internals
from crisp_flex.passes.mask_formula import K
from crisp_flex.passes.mask_spec import MaskSpec, PaddingLoad, SameIds
from crisp_flex.passes.node_ops import tensor_of
from crisp_flex.report import Reason, Rejection


@dataclass(frozen=True, slots=True)
class Placement:
    """The mask of a site that is rewritten.

    Query i stands at position i + Lkv - Lq among the first Lkv keys; sees none behind itself, none
    that is padding, none of another id, and if there is a window none before it.

    Args:
        Lkv: Keys that any query may see: a number or an expression over sizes.
        cut: K and V have more keys than that.
        moved: A 0-dim integer tensor, read where the mask was built: query i stands at position
            i + moved + moved_by instead.
        moved_by: See moved.
        window: Keys that a query sees, itself among them; None for no limit.
        padding: Which keys are there; None for all.
        same: Ids that must be equal; where they are chunks, window is at most a chunk.
    """

    Lkv: sympy.Expr
    cut: bool = False
    moved: fx.Node | None = None
    moved_by: int = 0
    window: int | None = None
    padding: PaddingLoad | None = None
    same: SameIds | None = None


def place(
    query: torch.Tensor, key: torch.Tensor, mask: MaskSpec | None, *, reading: str
) -> Placement | Rejection:
    """The placement of a call whose mask is causal, else the reason why there is none.

    What is not known statically about sizes is decided by guards, for the sizes that the graph is
    compiled for.

    Args:
        query: [B, Hq, Lq, D], a fake tensor.
        key: [B, Hkv, Lkv, D].
        mask: The reading of the attn_mask, without `other`; None for is_causal=True.
        reading: What to call the mask in a rejection.
    """
    sizes = torch_internals.Sizes(query)
    Lq, Lkv = (torch_internals.size_expr(x.shape[2]) for x in (query, key))
    if Lq is None or Lkv is None:
        return Rejection(Reason.LENGTHS_DIFFER, reading)
    if mask is None:
        # is_causal is top-left aligned, so only a square call may be read as causal. Separate
        # inputs of a dynamic graph have different symbols even when equal: that takes a guard.
        if sizes.hold(sympy.Eq(Lq, Lkv)):
            return Placement(Lkv)
        return Rejection(Reason.LENGTHS_DIFFER, f"Lq={Lq}, Lkv={Lkv}")
    return _Placer(sizes, Lq, Lkv, mask, query.device, reading).place()


@dataclass(frozen=True, slots=True)
class _Placer:
    sizes: torch_internals.Sizes
    Lq: sympy.Expr
    Lkv: sympy.Expr
    mask: MaskSpec
    device: torch.device
    reading: str

    def place(self) -> Placement | Rejection:
        moved = self._moved()
        if isinstance(moved, Rejection):
            return moved
        length = self._visible_keys(moved)
        if isinstance(length, Rejection):
            return length
        window = self._window(length)
        if isinstance(window, Rejection):
            return window
        same = self.mask.same[0] if self.mask.same else None
        if same is not None and (size := same.chunk_size(self.mask.q_offset)) is not None:
            if self.sizes.hold(sympy.Le(length, size)):
                # K / C alone: there is one chunk, and all are in it
                alone = moved is None and same.of_key == sympy.floor(K / size)
                same = None if alone else same
            else:
                window = size if window is None else min(window, size)
        tensor, plus = moved if moved is not None else (None, 0)
        return Placement(
            Lkv=length,
            cut=not self.sizes.known(sympy.Eq(length, self.Lkv)),
            moved=tensor,
            moved_by=plus,
            window=window,
            padding=self.mask.padding[0] if self.mask.padding else None,
            same=same,
        )

    def _moved(self) -> tuple[fx.Node, int] | Rejection | None:
        """The tensor in q_offset and the number added to it; None where q_offset is of sizes."""
        tensors = self.mask.tensors(self.mask.q_offset)
        if not tensors:
            return None
        if len(tensors) == 1:
            ((symbol, node),) = tensors.items()
            rest = sympy.expand(self.mask.q_offset - symbol)
            tensor = tensor_of(node)
            if rest.is_Integer and tensor is not None:
                if tensor.device == self.device:
                    return node, int(rest)
                where = f"position on {tensor.device}, query on {self.device}"
                return Rejection(Reason.MASK_DEVICE, where)
        return Rejection(Reason.MASK_OFFSET, self.reading)

    def _visible_keys(self, moved: tuple[fx.Node, int] | None) -> sympy.Expr | Rejection:
        limit = self.mask.kv_limit
        if limit is not None and self.mask.tensors(limit):
            return Rejection(Reason.MASK_KV_LIMIT, self.reading)
        if moved is not None:
            if limit is None or self.sizes.hold(sympy.Ge(limit, self.Lkv)):
                return self.Lkv
            if self.sizes.hold(sympy.Ge(limit, self.Lq)):
                return limit
            return Rejection(Reason.MASK_KV_LIMIT, self.reading)
        seen = sympy.expand(self.Lq + self.mask.q_offset)
        if limit is not None and not self.sizes.hold(sympy.Ge(limit, seen)):
            return Rejection(Reason.MASK_KV_LIMIT, self.reading)
        if self.sizes.hold(sympy.Eq(seen, self.Lkv)):
            return seen
        if self.sizes.hold(sympy.Lt(seen, self.Lkv)) and self.sizes.hold(sympy.Ge(seen, self.Lq)):
            return seen
        return Rejection(Reason.MASK_OFFSET, self.reading)

    def _window(self, length: sympy.Expr) -> int | Rejection | None:
        """The window in tokens, None where no key is far enough away to be outside."""
        window = self.mask.window
        if window is None or self.mask.tensors(window):
            return None if window is None else Rejection(Reason.MASK_WINDOW, self.reading)
        if self.sizes.hold(sympy.Le(length, window)):
            return None
        width = self.sizes.number(window)  # of the model, so one number for all its graphs
        if width is None or width < 1:
            return Rejection(Reason.MASK_WINDOW, self.reading)
        return width
