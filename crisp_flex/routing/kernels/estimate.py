"""Stage `estimate` of policy "bounded" on the GPU: each block's mean query against every key.

Oracle: routing.estimate. A tile of the stage `probe` with mean queries as its rows, so bound by
tl.dot and exp2 like that: 1 / block_q of what attention's forward has in its first product.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from crisp_flex.routing.kernels.layout import Layout
from crisp_flex.routing.kernels.positions import query_span, row_ends
from crisp_flex.routing.kernels.probe import has_wgmma
from crisp_flex.routing.kernels.tile import LOG2_E, exponentials, key_dots, log2_sum

# As in the stage `probe`.
TILE_ROWS = 128
REGISTERS = 128
NUM_STAGES = 2
# Key blocks per program: enough to pay for loading the rows, few enough for some waves of programs.
LEAST_SPLIT, MOST_SPLIT = 8, 32


def estimate(mean_query: Tensor, key: Tensor, layout: Layout, *, scale: float) -> Tensor:
    """log2 of the sum of exponentials of each block's mean query over each key block.

    Args:
        mean_query: [B, Hq, Nq, D] fp32, contiguous; rounded to the dtype of key.
        key: [B, Hkv, Lkv, D], any strides.
        layout: Of this call.
        scale: Factor on the logits.

    Returns:
        [B, Hq, Nq, Nkv] fp32, -inf where no key is visible to the block's last query, NaN where a
        logit is; undefined for key blocks past the one in which that query stands.
    """
    x = layout
    sums = mean_query.new_empty((x.B, x.Hq, x.Nq, x.Nkv))
    rows = min(TILE_ROWS, max(int(triton.next_power_of_2(x.Nq)), 16))
    heads = min(TILE_ROWS // rows, int(triton.next_power_of_2(x.G)))
    split_blocks = min(max(x.Nkv // 16, LEAST_SPLIT), MOST_SPLIT)
    tiles = triton.cdiv(x.G, heads) * triton.cdiv(x.Nq, rows)
    _estimate_kernel[(tiles, triton.cdiv(x.Nkv, split_blocks), x.B * x.Hkv)](
        mean_query,
        key,
        sums,
        x.key_valid,
        x.q_offset,
        *key.stride(),
        x.Hkv,
        x.G,
        x.Lq,
        x.Lkv,
        scale * LOG2_E.value,
        split_blocks,
        D=x.D,
        BLOCK_D=x.BLOCK_D,
        BLOCK_Q=x.block_q,
        BLOCK_KV=x.block_kv,
        ROWS=rows,
        HEADS=heads,
        NUM_STAGES=NUM_STAGES,
        num_warps=8 if rows * heads == TILE_ROWS else 4,
        maxnreg=REGISTERS if x.D <= 128 and has_wgmma(key.device) else None,
    )
    return sums


@triton.jit(do_not_specialize=["Hkv", "G", "Lq", "Lkv", "split_blocks"])
def _estimate_kernel(
    mean_q_ptr,
    k_ptr,
    sums_ptr,
    key_valid_ptr,
    offset_ptr,
    stride_kb,
    stride_kh,
    stride_kl,
    stride_kd,
    Hkv,
    G,
    Lq,
    Lkv,
    exponent,
    split_blocks,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Grid (tiles of query blocks * tiles of heads, splits, B * Hkv); the longest rows first."""
    head_tiles = tl.cdiv(G, HEADS)
    Nq, Nkv = tl.cdiv(Lq, BLOCK_Q), tl.cdiv(Lkv, BLOCK_KV)
    row_first = (tl.cdiv(Nq, ROWS) - 1 - tl.program_id(0) // head_tiles) * ROWS
    # int64 before the first multiply
    b = tl.program_id(2).to(tl.int64) // Hkv
    hk = tl.program_id(2).to(tl.int64) % Hkv
    offset, reach = query_span(offset_ptr, Lq, Lkv)
    m = tl.arange(0, HEADS * ROWS)
    row = row_first + m % ROWS
    g = (tl.program_id(0) % head_tiles) * HEADS + m // ROWS
    there = (row < Nq) & (g < G)
    _, position = row_ends(row, offset, reach, BLOCK_Q)
    # rows past the last one repeat its position
    position = tl.minimum(position, reach - 1)
    j_first = tl.program_id(1) * split_blocks
    j_last = tl.minimum(j_first + split_blocks, tl.max(position, 0) // BLOCK_KV + 1)
    if j_first < j_last:
        d = tl.arange(0, BLOCK_D)
        bh = (b * Hkv + hk) * G + g  # [M] int64
        q_ptrs = mean_q_ptr + (bh * Nq + row)[:, None] * D + d[None, :]
        q = tl.load(q_ptrs, mask=there[:, None] & (d < D)[None, :], other=0.0)
        q = q.to(k_ptr.dtype.element_ty)
        k_ptr += b * stride_kb + hk * stride_kh
        if key_valid_ptr is not None:
            key_valid_ptr += b * Lkv
        out_ptrs = sums_ptr + (bh * Nq + row) * Nkv
        j_masked = j_first
        if key_valid_ptr is None:
            # blocks that the first row sees whole need no mask
            j_masked = tl.minimum(
                tl.maximum((tl.min(position, 0) + 1) // BLOCK_KV, j_first), j_last
            )
            for blk in tl.range(j_first, j_masked, num_stages=NUM_STAGES):
                dots = key_dots(
                    q, k_ptr, key_valid_ptr, stride_kl, stride_kd, position, blk, Lkv,
                    D, BLOCK_D, BLOCK_KV, False,
                )  # fmt: skip
                tl.store(out_ptrs + blk, _log2_of_exponentials(dots, exponent), mask=there)
        for blk in tl.range(j_masked, j_last, num_stages=1):
            dots = key_dots(
                q, k_ptr, key_valid_ptr, stride_kl, stride_kd, position, blk, Lkv,
                D, BLOCK_D, BLOCK_KV, True,
            )  # fmt: skip
            tl.store(out_ptrs + blk, _log2_of_exponentials(dots, exponent), mask=there)


@triton.jit
def _log2_of_exponentials(dots, exponent):
    """[M]: log2 of the sum of exp2(dots * exponent) over the columns of dots [M, N]."""
    top, weights = exponentials(dots, exponent)
    return log2_sum(top, tl.sum(weights, 1))
