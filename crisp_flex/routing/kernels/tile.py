"""One tile of the stage `probe`: the rows of a program against one block of keys."""

from __future__ import annotations

import triton
import triton.language as tl

from crisp_flex.routing.kernels.positions import WINDOW, own_bin

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def add_tile(
    q, k_ptr, tile_ptrs, key_valid_ptr, stride_kl, stride_kd, position, is_head, blk, first, Lkv,
    exponent, top, total, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_KV: tl.constexpr,
    ROWS: tl.constexpr, PLANES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Store the row sums of key block blk; return the running maximum and sum with it."""
    dots = key_dots(
        q, k_ptr, key_valid_ptr, stride_kl, stride_kd, position, blk, Lkv,
        D, BLOCK_D, BLOCK_KV, MASKED,
    )  # fmt: skip
    tile_top, weights = exponentials(dots, exponent)
    tile_total = tl.sum(weights, 1)
    Nkv = tl.cdiv(Lkv, BLOCK_KV)
    block_ptrs = tile_ptrs + tl.cast(blk, tl.int64) * ROWS
    if PLANES == 0:
        tl.store(block_ptrs, log2_sum(tile_top, tile_total), mask=is_head)
    else:
        # distance - BLOCK_KV * (own bin of the first row - blk), of each row to column 0
        n = tl.arange(0, BLOCK_KV)
        farthest = (position - own_bin(first, ROWS, BLOCK_KV) * BLOCK_KV)[:, None]
        # columns of distance below c bins, for each c: a plane is what the next one has more; the
        # last has all columns, since none is farther
        below = tl.zeros_like(tile_total)
        for c in tl.static_range(PLANES):
            up_to = tile_total
            if c < PLANES - 1:
                inside = n[None, :] > farthest - c * BLOCK_KV
                up_to = tl.sum(tl.where(inside, weights, 0.0), 1)
            plane_ptrs = block_ptrs + c * tl.cast(Nkv, tl.int64) * ROWS
            tl.store(plane_ptrs, log2_sum(tile_top, up_to - below), mask=is_head)
            below = up_to
    new_top = tl.maximum(top, tile_top)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    return new_top, total * tl.exp2(top - base) + tile_total * tl.exp2(tile_top - base)


@triton.jit
def structure_sum(
    q, k_ptr, key_valid_ptr, stride_kl, stride_kd, position, j_first, j_last, start, hi, Lkv,
    exponent, top, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """Sum of exp2(logit - top) over the first and the last WINDOW keys in blocks j_first .. j_last.

    The keys are valid ones from start on, and up to hi. A second look at no more than four blocks,
    so that the loop over all of them carries nothing of it.
    """
    base = tl.where(top == float("-inf"), 0.0, top)
    structure = tl.zeros_like(top)
    sink_last = (start + WINDOW - 1) // BLOCK_KV + 1
    recent_first = tl.maximum(tl.maximum(hi - WINDOW, 0) // BLOCK_KV, sink_last)
    for end in tl.static_range(2):
        if end == 0:
            first, last = start // BLOCK_KV, sink_last
        else:
            first, last = recent_first, (hi - 1) // BLOCK_KV + 1
        for blk in tl.range(tl.maximum(first, j_first), tl.minimum(last, j_last), num_stages=1):
            dots = key_dots(
                q, k_ptr, key_valid_ptr, stride_kl, stride_kd, position, blk, Lkv,
                D, BLOCK_D, BLOCK_KV, True,
            )  # fmt: skip
            token = blk * BLOCK_KV + tl.arange(0, BLOCK_KV)
            inside = (token < start + WINDOW) | (token >= hi - WINDOW)
            weights = tl.exp2(dots * exponent - base[:, None])
            structure += tl.sum(tl.where(inside[None, :], weights, 0.0), 1)
    return structure


@triton.jit
def key_dots(
    q, k_ptr, key_valid_ptr, stride_kl, stride_kd, position, blk, Lkv, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_KV: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """[M, BLOCK_KV] fp32: q over key block blk, -inf where not visible; MASKED looks for that."""
    n = tl.arange(0, BLOCK_KV)
    d = tl.arange(0, BLOCK_D)
    # int64 up to the block; within it the offsets are small and the same for every block
    block_ptr = k_ptr + tl.cast(blk, tl.int64) * BLOCK_KV * stride_kl
    k_ptrs = block_ptr + (n[None, :] * stride_kl + d[:, None] * stride_kd)
    there = blk * BLOCK_KV + n < Lkv
    if MASKED:
        k = tl.load(k_ptrs, mask=there[None, :] & (d < D)[:, None], other=0.0)
    elif BLOCK_D != D:
        k = tl.load(k_ptrs, mask=(d < D)[:, None], other=0.0)
    else:
        k = tl.load(k_ptrs)
    dots = tl.dot(q, k, input_precision="ieee")
    if MASKED:
        if key_valid_ptr is not None:
            token = blk * BLOCK_KV + n
            there = there & (tl.load(key_valid_ptr + token, mask=there, other=0) != 0)
        visible = (n[None, :] <= (position - blk * BLOCK_KV)[:, None]) & there[None, :]
        dots = tl.where(visible, dots, float("-inf"))
    return dots


@triton.jit
def exponentials(dots, exponent):
    """The largest logit of each row [M] in log2, and exp2 of the logits less that [M, N]."""
    top = tl.max(dots, 1) * exponent
    # a row that sees nothing here has all weights exp2(-inf)
    finite_top = tl.where(top == float("-inf"), 0.0, top)
    return top, tl.exp2(dots * exponent - finite_top[:, None])


@triton.jit
def log2_sum(top, total):
    """top + log2(total), -inf where total is 0 or, by rounding, below; NaN where it is NaN.

    A maximum passes over NaN, a sum of exponentials with it does not: top may lack what total has.
    """
    # one instruction more than -inf; a log2 that may meet NaN, or less than 1.2e-38, is several
    nothing = tl.minimum(total, float("-inf"), propagate_nan=tl.PropagateNan.ALL)
    return tl.where(total > 0, top + tl.log2(tl.maximum(total, 1.2e-38)), nothing)
