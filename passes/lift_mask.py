"""Read an attn_mask: from the nodes that build it to a MaskSpec."""

from __future__ import annotations

from dataclasses import replace

import sympy
import torch
from torch import fx

from crisp_flex.passes.lift_bias import BiasLifter
from crisp_flex.passes.mask_formula import INDICES, Coords
from crisp_flex.passes.mask_spec import MaskSpec
from crisp_flex.passes.mutation import in_place_conflict, written_later
from crisp_flex.passes.node_ops import UnreadError, shape_of, tensor_of
from crisp_flex.passes.read_mask import read_mask


def lift_mask(mask: fx.Node) -> MaskSpec:
    """The reading of mask, the attn_mask of an SDPA call on 4-D tensors; the graph is not changed.

    Element (b, h, q, k) is followed back through the nodes that produce it, on demand, down to
    arange values, constants and loads of tensors; the conjunction found that way is then read.

    Before:
        %rows = arange(64);  %q = rows[:, None];  %k = rows[None, :];  %le = le(k, q)
        %pad = getitem(attention_mask, (batch, k));  %mask = and_(le, pad)
    Result:
        MaskSpec(causal=True, padding=(PaddingLoad(attention_mask),))

    Args:
        mask: Boolean, or additive with nothing but 0 and -inf (or the dtype's minimum) in it; of
            rank 2 to 4, broadcastable to (B, Hq, Lq, Lkv).

    Returns:
        What was read.  A mask, or a conjunct of it, that is not understood is in `other`; nothing
        is raised for it.  The reading holds for the tensors' values where mask stands.
    """
    tensor = tensor_of(mask)
    if tensor is None or not 2 <= tensor.ndim <= 4:
        kind = "no tensor" if tensor is None else f"rank {tensor.ndim}"
        return MaskSpec(other=(f"mask {mask.name} is not of rank 2 to 4: {kind}",))
    if (conflict := in_place_conflict(mask)) is not None:
        return MaskSpec(other=(conflict,))
    lifter = BiasLifter()
    try:
        if tensor.dtype == torch.bool:
            formula = lifter.truth(mask, _mask_coords(mask))
        else:
            formula = lifter.visible(mask, _mask_coords(mask), tensor.dtype)
        spec = replace(read_mask(formula, mask, lifter), finite=lifter.finite)
    except (UnreadError, RecursionError) as error:
        return MaskSpec(other=(f"mask {mask.name}: {error}",))
    return written_later(spec, mask)


def _mask_coords(mask: fx.Node) -> Coords:
    """(b, h, q, k), right-aligned; a dimension of size 1 is broadcast, so its coordinate is 0."""
    sizes = shape_of(mask)
    indices = INDICES[len(INDICES) - len(sizes) :]
    return tuple(
        sympy.Integer(0) if size == 1 else index for size, index in zip(sizes, indices, strict=True)
    )
