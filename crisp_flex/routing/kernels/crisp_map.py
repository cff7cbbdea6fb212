"""Logits of the pooled map, a tile at a time, for the stages of policy "crisp" that need them.

Oracle: routing.pool.pooled_map.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Head dim at a time: an operand of tf32x3 has its parts in registers (offline, 64 x 64 tiles,
# 4 warps: no spills on sm_90, at most 24 bytes on sm_80; all 128 at once spilled 19 KB there).
TILE_DEPTH = tl.constexpr(32)
PRECISION = tl.constexpr("tf32x3")


@triton.jit
def map_logits(
    mean_q_ptr, mean_k_ptr, row, blk, Nq, Nkv, exponent, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """[rows, blocks] fp32 logits of a head between pooled queries row and pooled keys blk.

    Times exponent, with the accuracy of fp32: three tf32 dots (error 2^-21 of a product).
    """
    DEPTH: tl.constexpr = TILE_DEPTH if BLOCK_D > TILE_DEPTH else BLOCK_D
    logits = tl.zeros([row.shape[0], blk.shape[0]], tl.float32)
    for start_d in range(0, D, DEPTH):
        d = start_d + tl.arange(0, DEPTH)
        mean_q = tl.load(
            mean_q_ptr + row[:, None] * D + d[None, :],
            mask=((row >= 0) & (row < Nq))[:, None] & (d < D)[None, :],
            other=0.0,
        )
        mean_k = tl.load(
            mean_k_ptr + blk[None, :] * D + d[:, None],
            mask=(blk < Nkv)[None, :] & (d < D)[:, None],
            other=0.0,
        )
        logits = tl.dot(mean_q, mean_k, logits, input_precision=PRECISION)
    return logits * exponent
