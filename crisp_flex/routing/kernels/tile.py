"""One tile of the stage `probe`: the rows of a program against one block of keys."""

from __future__ import annotations

import triton
import triton.language as tl

from crisp_flex.routing.kernels.layout import WINDOW, own_bin

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def add_tile(
    q,
    k_ptr,
    tile_ptrs,
    key_valid_ptr,
    stride_kl,
    stride_kd,
    position,
    is_head,
    blk,
    first,
    start,
    hi,
    Lkv,
    exponent,
    top,
    total,
    structure,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    ROWS: tl.constexpr,
    PLANES: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Store the row sums of key block blk; return the running maximum and sums with it."""
    n = tl.arange(0, BLOCK_KV)
    token = blk * BLOCK_KV + n
    d = tl.arange(0, BLOCK_D)
    # int64 up to the block; within it the offsets are small and the same for every block
    block_ptr = k_ptr + tl.cast(blk, tl.int64) * BLOCK_KV * stride_kl
    k_ptrs = block_ptr + (n[None, :] * stride_kl + d[:, None] * stride_kd)
    there = token < Lkv
    if MASKED:
        k = tl.load(k_ptrs, mask=there[None, :] & (d < D)[:, None], other=0.0)
    elif BLOCK_D != D:
        k = tl.load(k_ptrs, mask=(d < D)[:, None], other=0.0)
    else:
        k = tl.load(k_ptrs)
    logits = tl.dot(q, k, input_precision="ieee") * exponent  # [M, BLOCK_KV]
    if MASKED:
        if key_valid_ptr is not None:
            there = there & (tl.load(key_valid_ptr + token, mask=there, other=0) != 0)
        visible = (n[None, :] <= (position - blk * BLOCK_KV)[:, None]) & there[None, :]
        logits = tl.where(visible, logits, float("-inf"))
    tile_top = tl.max(logits, 1)
    # a row that sees nothing here has all weights exp2(-inf)
    finite_top = tl.where(tile_top == float("-inf"), 0.0, tile_top)
    weights = tl.exp2(logits - finite_top[:, None])
    tile_total = tl.sum(weights, 1)
    Nkv = tl.cdiv(Lkv, BLOCK_KV)
    block_ptrs = tile_ptrs + tl.cast(blk, tl.int64) * ROWS
    if PLANES == 0:
        tl.store(block_ptrs, log2_sum(tile_top, tile_total), mask=is_head)
    else:
        # distance - BLOCK_KV * (own bin of the first row - blk), of each row to column 0
        farthest = (position - own_bin(first, ROWS, BLOCK_KV) * BLOCK_KV)[:, None]
        for c in tl.static_range(PLANES):
            # columns of distance at least c - 1 bins, and less than c bins; no row has any beyond
            inside = n[None, :] <= farthest - (c - 1) * BLOCK_KV
            if c == 0:
                inside = n[None, :] > farthest
            elif c < PLANES - 1:
                inside = inside & (n[None, :] > farthest - c * BLOCK_KV)
            plane = tl.sum(tl.where(inside, weights, 0.0), 1)
            plane_ptrs = block_ptrs + c * tl.cast(Nkv, tl.int64) * ROWS
            tl.store(plane_ptrs, log2_sum(tile_top, plane), mask=is_head)
    new_top = tl.maximum(top, tile_top)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    old, new = tl.exp2(top - base), tl.exp2(tile_top - base)
    if PLANES > 0:
        first_token = blk * BLOCK_KV
        in_structure = (n < start + WINDOW - first_token) | (n >= hi - WINDOW - first_token)
        tile_structure = tl.sum(tl.where(in_structure[None, :], weights, 0.0), 1)
        structure = structure * old + tile_structure * new
    return new_top, total * old + tile_total * new, structure


@triton.jit
def log2_sum(top, total):
    """top + log2(total), -inf where total is 0."""
    return tl.where(total > 0, top + tl.log2(tl.maximum(total, 1e-38)), float("-inf"))
