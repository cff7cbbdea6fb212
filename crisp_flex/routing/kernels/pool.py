"""Stage `pool` on the GPU: mean query and key of each block.

Oracle: routing.pool.pool. Bound by bytes: Q and K are read once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from crisp_flex.routing.kernels.layout import Layout
from crisp_flex.routing.kernels.pooled import SplitKeys, split
from crisp_flex.routing.kernels.positions import bounds_of, query_span

# One tile a program, so only enough warps for 16-byte loads in flight: 1.14 times the floor on an
# H200 at 128k (2026-11-30, bench_route).
NUM_WARPS = 4


def pool(query: Tensor, key: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Mean query and key of each block over the valid tokens there; zero where there is none.

    A block with NaN or Inf in it has the mean NaN there.

    Args:
        query: [B, Hq, Lq, D], any strides.
        key: [B, Hkv, Lkv, D], any strides.
        layout: Of this call.

    Returns:
        [B, Hq, Nq, D] and [B, Hkv, Nkv, D] fp32, contiguous.
    """
    x = layout
    mean_query = query.new_empty((x.B, x.Hq, x.Nq, x.D), dtype=torch.float32)
    mean_key = query.new_empty((x.B, x.Hkv, x.Nkv, x.D), dtype=torch.float32)
    _launch(query, key, mean_query, mean_key, None, layout)
    return mean_query, mean_key


def pool_queries(query: Tensor, layout: Layout) -> Tensor:
    """As pool, of the queries alone: [B, Hq, Nq, D] fp32, contiguous."""
    x = layout
    mean_query = query.new_empty((x.B, x.Hq, x.Nq, x.D), dtype=torch.float32)
    _launch(query, None, mean_query, mean_query, None, layout)
    return mean_query


def pool_split(query: Tensor, key: Tensor, layout: Layout) -> tuple[Tensor, SplitKeys]:
    """As pool, with the keys as the pairs that kernels/pooled.py takes."""
    x = layout
    mean_query = query.new_empty((x.B, x.Hq, x.Nq, x.D), dtype=torch.float32)
    keys = SplitKeys(
        parts=query.new_empty((2, x.B, x.Hkv, x.Nkv, x.D), dtype=torch.float16),
        scale=query.new_empty((x.B, x.Hkv, x.Nkv), dtype=torch.float32),
    )
    _launch(query, key, mean_query, keys.parts, keys.scale, layout)
    return mean_query, keys


def _launch(
    query: Tensor,
    key: Tensor | None,
    mean_query: Tensor,
    mean_key: Tensor,
    key_scale: Tensor | None,
    layout: Layout,
) -> None:
    x = layout
    key_blocks = 0 if key is None else x.Nkv * x.Hkv
    key = query if key is None else key
    _pool_kernel[(x.Nq * x.Hq + key_blocks, x.B)](
        query,
        key,
        mean_query,
        mean_key,
        key_scale,
        x.key_valid,
        x.bounds,
        x.q_offset,
        *query.stride(),
        *key.stride(),
        x.Hq,
        x.Hkv,
        x.Lq,
        x.Lkv,
        D=x.D,
        BLOCK_D=x.BLOCK_D,
        BLOCK_Q=x.block_q,
        BLOCK_KV=x.block_kv,
        num_warps=NUM_WARPS,
    )


@triton.jit(do_not_specialize=["Hq", "Hkv", "Lq", "Lkv"])
def _pool_kernel(
    q_ptr,
    k_ptr,
    mean_q_ptr,
    mean_k_ptr,
    key_scale_ptr,
    key_valid_ptr,
    bounds_ptr,
    offset_ptr,
    stride_qb,
    stride_qh,
    stride_ql,
    stride_qd,
    stride_kb,
    stride_kh,
    stride_kl,
    stride_kd,
    Hq,
    Hkv,
    Lq,
    Lkv,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """Grid (Nq * Hq + Nkv * Hkv, B): one block of queries of one head, or of keys."""
    pid = tl.program_id(0)
    # int64 before the first multiply: at H=32, L=131072, D=128 batch 4 starts at element 2**31
    b = tl.program_id(1).to(tl.int64)
    Nq = tl.cdiv(Lq, BLOCK_Q)
    Nkv = tl.cdiv(Lkv, BLOCK_KV)
    offset, reach = query_span(offset_ptr, Lq, Lkv)
    d = tl.arange(0, BLOCK_D)
    if pid < Nq * Hq:
        h = (pid // Nq).to(tl.int64)
        block = pid % Nq
        q_token = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
        q_valid = q_token < Lq
        if bounds_ptr is not None:
            start, end = bounds_of(bounds_ptr, b, reach)
            position = q_token + offset
            q_valid = q_valid & (position >= start) & (position < end)
        x_ptr = q_ptr + b * stride_qb + h * stride_qh
        mean = _mean(x_ptr, q_token, q_valid, stride_ql, stride_qd, D, BLOCK_D)
        out_ptr = mean_q_ptr + ((b * Hq + h) * Nq + block) * D
        tl.store(out_ptr + d, mean, mask=d < D)
    else:
        pid = pid - Nq * Hq
        h = (pid // Nkv).to(tl.int64)
        block = pid % Nkv
        k_token = block * BLOCK_KV + tl.arange(0, BLOCK_KV)
        k_valid = k_token < reach
        if key_valid_ptr is not None:
            there = tl.load(key_valid_ptr + b * Lkv + k_token, mask=k_valid, other=0)
            k_valid = k_valid & (there != 0)
        x_ptr = k_ptr + b * stride_kb + h * stride_kh
        mean = _mean(x_ptr, k_token, k_valid, stride_kl, stride_kd, D, BLOCK_D)
        vector = (b * Hkv + h) * Nkv + block
        k_out_ptr = mean_k_ptr + vector * D
        if key_scale_ptr is None:
            tl.store(k_out_ptr + d, mean, mask=d < D)
        else:
            hi, lo, scale = split(mean[None, :])
            low_stride = tl.cast(tl.num_programs(1), tl.int64) * Hkv * Nkv * D
            mask = (d < D)[None, :]
            tl.store(k_out_ptr + d[None, :], hi, mask=mask)
            tl.store(k_out_ptr + low_stride + d[None, :], lo, mask=mask)
            tl.store(key_scale_ptr + vector + tl.arange(0, 1), scale)


@triton.jit
def _mean(x_ptr, token, valid, stride_l, stride_d, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """[BLOCK_D] fp32: mean over the valid tokens [BLOCK_L] of x."""
    d = tl.arange(0, BLOCK_D)
    x_ptrs = x_ptr + token.to(tl.int64)[:, None] * stride_l + d[None, :] * stride_d
    # masked, not multiplied: what stands in padding may be NaN
    x = tl.load(x_ptrs, mask=valid[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
    # a short or padded block divides by its own token count
    tokens = tl.maximum(tl.sum(valid.to(tl.int32), 0), 1).to(tl.float32)
    mean = tl.sum(x, 0) / tokens
    # Inf becomes NaN, as it may give some rows no mass and others all of it
    return mean + 0.0 * mean
