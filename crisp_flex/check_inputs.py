"""What `route` and `sparse_attention` take: a wrong input is named in one sentence."""

from __future__ import annotations

import torch
from torch import Tensor

from crisp_flex.errors import InputError


def check_inputs(query: Tensor, key: Tensor, value: Tensor, key_valid: Tensor | None) -> None:
    """Raise InputError unless shapes, dtypes and devices fit together.

    Args:
        query: [B, Hq, Lq, D].
        key: [B, Hkv, Lkv, D], Hq a multiple of Hkv, Lkv >= Lq.
        value: [B, Hkv, Lkv, Dv].
        key_valid: [B, Lkv] bool, or None.
    """
    shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
    if not query.dim() == key.dim() == value.dim() == 4:
        raise InputError(f"query, key and value must be [B, H, L, D]; got {shapes}")
    if not query.dtype == key.dtype == value.dtype or query.dtype not in (
        torch.float32,
        torch.float16,
        torch.bfloat16,
    ):
        raise InputError(
            "query, key and value must share float32, float16 or bfloat16; got "
            f"{query.dtype}, {key.dtype}, {value.dtype}"
        )
    if not query.device == key.device == value.device:
        raise InputError(
            f"query, key and value must be on one device; got {query.device}, {key.device}, "
            f"{value.device}"
        )
    B, Hq, Lq, D = query.shape
    Hkv, Lkv = key.shape[1:3]
    if key.shape[0] != B or value.shape[:3] != key.shape[:3] or key.shape[3] != D:
        raise InputError(f"batch, key heads, key length or head dim do not match: {shapes}")
    if Hkv == 0 or Hq % Hkv:
        raise InputError(f"the query heads must be a multiple of the key heads: {shapes}")
    if Lq == 0:
        raise InputError(f"query has no tokens: {shapes}")
    if Lkv < Lq:
        raise InputError(f"Lkv must be at least Lq (the last query sees the last key): {shapes}")
    if key_valid is not None and (key_valid.shape != (B, Lkv) or key_valid.dtype != torch.bool):
        raise InputError(
            f"key_valid must be [B, Lkv] = [{B}, {Lkv}] bool; got {list(key_valid.shape)} "
            f"{key_valid.dtype}"
        )
