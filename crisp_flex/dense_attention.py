"""Dense causal attention with the meaning of `sparse_attention`, in memory linear in the length."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Elements of a boolean mask that exist at a time: 64 MiB.
_MOST_MASK = 1 << 26


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, key_valid: Tensor | None, scale: float | None
) -> Tensor:
    """SDPA in which query i sees keys 0 .. i + Lkv - Lq; rows that see no key are as SDPA's.

    Args:
        query: [B, Hq, Lq, D].
        key: [B, Hkv, Lkv, D], Lkv >= Lq.
        value: [B, Hkv, Lkv, Dv].
        key_valid: [B, Lkv] bool, False where a key is padding, or None.
        scale: Factor on the logits; None is 1/sqrt(D).
    """
    Lq, Lkv = query.shape[2], key.shape[2]
    gqa = query.shape[1] != key.shape[1]
    if key_valid is None and Lq == Lkv:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=gqa
        )
    positions = torch.arange(Lkv, device=query.device)
    rows = max(_MOST_MASK // (Lkv * (1 if key_valid is None else max(query.shape[0], 1))), 1)
    parts = []
    for start in range(0, Lq, rows):
        some = query[:, :, start : start + rows]
        end = start + some.shape[2] + Lkv - Lq  # keys that any of them sees
        mask = positions[:end] <= positions[end - some.shape[2] : end, None]
        if key_valid is not None:
            mask = mask & key_valid[:, None, None, :end]
        k, v = key[:, :, :end], value[:, :, :end]
        parts.append(
            F.scaled_dot_product_attention(some, k, v, attn_mask=mask, scale=scale, enable_gqa=gqa)
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)
