"""What `route` and `sparse_attention` take: a wrong input is named in one sentence."""

from __future__ import annotations

import warnings

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
    kinds = [type(x).__name__ for x in (query, key, value) if not isinstance(x, Tensor)]
    if kinds:
        raise InputError(f"query, key and value must be tensors [B, H, L, D]; got {kinds[0]}")
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
        raise InputError(
            "Lkv must be at least Lq, since the last query sees the last key (the layout is "
            f"[B, H, L, D]): {shapes}"
        )
    if key_valid is not None and (key_valid.shape != (B, Lkv) or key_valid.dtype != torch.bool):
        raise InputError(
            f"key_valid must be [B, Lkv] = [{B}, {Lkv}] bool; got {list(key_valid.shape)} "
            f"{key_valid.dtype}"
        )


def warn_of_gradients(*tensors: Tensor) -> None:
    """Warn where autograd would want a backward that is not there."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        warnings.warn(
            "crisp_flex.sparse_attention has no backward, so its result is detached from its "
            "inputs: call it under torch.no_grad(), or train with dense attention",
            stacklevel=3,
        )
