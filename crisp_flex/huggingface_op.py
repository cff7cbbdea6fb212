"""crisp_flex::attention: what SDPA cannot say, a soft cap on the logits and sinks, as one operator.

The passes find it as they find SDPA and rewrite it. Where it stays (decode steps, short prompts,
calls that are not proved) it computes dense attention, some rows at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Query rows whose logits are in memory at a time.
ROWS = 512

torch.library.define(
    "crisp_flex::attention",
    "(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? sinks, bool is_causal, "
    "float scale, float? softcap) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    sinks: Tensor | None,
    is_causal: bool,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Dense attention with a soft cap or sinks; inference only.

    Args:
        query: [B, Hq, Lq, D].
        key: [B, Hkv, Lkv, D], Hq a multiple of Hkv.
        value: [B, Hkv, Lkv, Dv].
        attn_mask: Broadcastable to [B, Hq, Lq, Lkv], of 4 dims: bool, or added to the logits.
        sinks: [Hq], a logit of each head that takes mass and has no value (gpt-oss).
        is_causal: Query i sees keys 0 .. i, as SDPA has it.
        scale: Factor on q @ k^T.
        softcap: Logits x become softcap * tanh(x / softcap), before the mask (Gemma 2).

    Returns:
        [B, Hq, Lq, Dv] contiguous, of query's dtype. A row that sees nothing is 0.
    """
    Lq = query.shape[2]
    out = query.new_empty((*query.shape[:3], value.shape[3]))
    for first in range(0, Lq, ROWS):
        rows = slice(first, min(first + ROWS, Lq))
        mask = attn_mask
        if mask is not None and mask.shape[2] != 1:
            mask = mask[:, :, rows]
        out[:, :, rows] = formula(
            query[:, :, rows], key, value, mask, sinks, first if is_causal else None, scale, softcap
        )
    return out


def formula(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    sinks: Tensor | None,
    first: int | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """`attention` in differentiable operations, all rows at once.

    Args:
        query: [B, Hq, Lq, D]; query i stands at position first + i.
        key: [B, Hkv, Lkv, D].
        value: [B, Hkv, Lkv, Dv].
        attn_mask: As for `attention`.
        sinks: [Hq], or None.
        first: Position of query 0 under causality; None for no causality.
        scale: Factor on q @ k^T.
        softcap: Cap on the logits, or None.
    """
    B, Hq, Lq, D = query.shape
    Hkv, Lkv = key.shape[1:3]
    # scaled before the product, which fp16 might not hold
    grouped = (query * scale).reshape(B, Hkv, (Hq // Hkv) * Lq, D)
    logits = (grouped @ key.transpose(-1, -2)).view(B, Hq, Lq, Lkv).float()
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if first is not None:
        tokens = torch.arange(Lkv, device=query.device)
        logits = logits.masked_fill(tokens > tokens[first : first + Lq, None], float("-inf"))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        logits = logits.masked_fill(~attn_mask, float("-inf"))
    elif attn_mask is not None:
        logits = logits + attn_mask
    if sinks is not None:
        extra = sinks.float().view(1, Hq, 1, 1).expand(B, Hq, Lq, 1)
        weights = torch.cat([logits, extra], -1).softmax(-1)[..., :-1]
    else:
        weights = logits.softmax(-1)
    # a row that sees nothing is 0; one with a NaN of its own stays NaN, as in SDPA
    unseeing = logits.amax(-1, keepdim=True) == float("-inf")
    weights = weights.masked_fill(unseeing, 0.0).to(value.dtype)
    return (weights.view(B, Hkv, -1, Lkv) @ value).view(B, Hq, Lq, value.shape[3])


torch.library.impl("crisp_flex::attention", ("cpu", "cuda"), attention)


@torch.library.register_fake("crisp_flex::attention")
def _attention_fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    sinks: Tensor | None,
    is_causal: bool,
    scale: float,
    softcap: float | None,
) -> Tensor:
    return query.new_empty((*query.shape[:3], value.shape[3]))
