"""The routing as plain functions, for people who call FlexAttention themselves."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from crisp_flex import flex_hop
from crisp_flex.config import CrispConfig
from crisp_flex.errors import InputError
from crisp_flex.routing import ops
from crisp_flex.routing.geometry import partial_slots
from crisp_flex.routing.params import RouteParams


def route(
    query: Tensor,
    key: Tensor,
    config: CrispConfig | None = None,
    *,
    scale: float | None = None,
    key_valid: Tensor | None = None,
) -> BlockMask:
    """The blocks that each query block attends to, as a BlockMask for `flex_attention`.

    Causal, aligned to the last key: query i sees keys 0 .. i + Lkv - Lq (a whole prompt, or a chunk
    after a cache). `min_seqlen` does not apply here.

    Args:
        query: [B, Hq, Lq, D], float32, float16 or bfloat16.
        key: [B, Hkv, Lkv, D], same dtype and device, Hq a multiple of Hkv, Lkv >= Lq.
        config: Policy and block sizes; None takes the defaults.
        scale: Factor on the logits; None is 1/sqrt(D).
        key_valid: [B, Lkv] bool, False where a key is padding.

    Returns:
        BlockMask of shape (B, Hq, Lq, Lkv) whose mask_mod is the exact causal (and padding) mask;
        its lists ascend within a row and hold the diagonal block of every row that sees anything.

    Raises:
        InputError: Shapes, dtypes or devices do not fit together.

    Source: CRISP, arXiv 2609.01925; the policy "hybrid" is our own
    (README, How it works).
    """
    _check_inputs(query, key, key, key_valid)
    config = config if config is not None else CrispConfig()
    params = RouteParams.from_config(config, D=query.shape[3], scale=scale)
    counts, buffer, full_counts, _ = ops.route(query, key, key_valid, params)
    Lq, Lkv = query.shape[2], key.shape[2]
    Nkv = -(-Lkv // params.block_kv)
    P = partial_slots(params.block_q, params.block_kv, Lq, Lkv, key_valid is not None)
    mask_mod: Any = flex_hop.causal_mod
    if key_valid is not None or Lq != Lkv:
        # a tensor, since a number would be a recompile per length; per batch, since FLASH cannot
        # index by a constant
        offset = torch.full((query.shape[0],), Lkv - Lq, dtype=torch.int32, device=key.device)
        mask_mod = _causal(offset) if key_valid is None else _padded(offset, key_valid)
    return BlockMask(
        seq_lengths=(Lq, Lkv),
        kv_num_blocks=counts,
        kv_indices=buffer[..., :Nkv],
        full_kv_num_blocks=full_counts,
        full_kv_indices=buffer[..., P:],
        q_num_blocks=None,
        q_indices=None,
        full_q_num_blocks=None,
        full_q_indices=None,
        BLOCK_SIZE=(params.block_q, params.block_kv),
        mask_mod=mask_mod,
    )


def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    config: CrispConfig | None = None,
    scale: float | None = None,
    key_valid: Tensor | None = None,
) -> Tensor:
    """Causal attention over the kept blocks; dense SDPA below `config.min_seqlen` queries.

    Args:
        query: [B, Hq, Lq, D], float32, float16 or bfloat16.
        key: [B, Hkv, Lkv, D], Hq a multiple of Hkv, Lkv >= Lq; query i sees keys 0 .. i + Lkv - Lq.
        value: [B, Hkv, Lkv, Dv].
        config: Policy, block sizes and min_seqlen; None takes the defaults.
        scale: Factor on the logits; None is 1/sqrt(D).
        key_valid: [B, Lkv] bool, False where a key is padding. A query that sees no key gives 0.

    Returns:
        [B, Hq, Lq, Dv], dtype of query. No gradients.

    Raises:
        InputError: Shapes, dtypes or devices do not fit together.
    """
    _check_inputs(query, key, value, key_valid)
    config = config if config is not None else CrispConfig()
    with torch.no_grad():
        if query.shape[2] < config.min_seqlen:
            return _dense(query, key, value, key_valid, scale)
        block_mask = route(query, key, config, scale=scale, key_valid=key_valid)
        kernel = flex_hop.choose_kernel(
            query.device,
            query.dtype,
            D=query.shape[3],
            Dv=value.shape[3],
            block_size=config.block_size,
            backend=config.backend,
            captures=False,  # what mask_mod reads are inputs here, not values of a graph
        )
        options = flex_hop.kernel_options(
            kernel,
            device=query.device,
            dtype=query.dtype,
            D=query.shape[3],
            divisible=False,
            user=config.kernel_options,
        )
        del options["OUTPUT_LOGSUMEXP"], options["OUTPUT_MAX"]  # set by flex_attention itself
        out: Tensor = _compiled_flex()(query, key, value, block_mask, scale, options)
        return out


@functools.cache
def _compiled_flex() -> Any:  # noqa: ANN401
    # one compiled function for the process: Dynamo keeps a version per shape, dtype and mask
    return torch.compile(_flex)


def _flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_mask: BlockMask,
    scale: float | None,
    options: dict[str, Any],
) -> Tensor:
    attend: Any = flex_attention  # its overloads take literal options only
    out: Tensor = attend(
        query,
        key,
        value,
        block_mask=block_mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        kernel_options=options,
    )
    return out


def _causal(offset: Tensor) -> Any:  # noqa: ANN401
    def causal(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        return q_idx + offset[b] >= kv_idx

    return causal


def _padded(offset: Tensor, key_valid: Tensor) -> Any:  # noqa: ANN401
    def causal_padded(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        return (q_idx + offset[b] >= kv_idx) & key_valid[b, kv_idx.to(torch.int64)]

    return causal_padded


def _dense(
    query: Tensor, key: Tensor, value: Tensor, key_valid: Tensor | None, scale: float | None
) -> Tensor:
    Lq, Lkv = query.shape[2], key.shape[2]
    gqa = query.shape[1] != key.shape[1]
    if key_valid is None and Lq == Lkv:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=gqa
        )
    positions = torch.arange(Lkv, device=query.device)
    mask = positions <= positions[Lkv - Lq :, None]
    if key_valid is not None:
        mask = mask & key_valid[:, None, None, :]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=gqa
    )


def _check_inputs(query: Tensor, key: Tensor, value: Tensor, key_valid: Tensor | None) -> None:
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
