"""Where rows and keys of a call stand, inside kernels: lengths, valid ranges, row sets, blocks.

The device's part of geometry.Geometry. Positions are int32; whatever is multiplied by a stride is
widened to int64 first by its user.
"""

from __future__ import annotations

import triton
import triton.language as tl

from crisp_flex.routing.geometry import WINDOW_TOKENS

WINDOW = tl.constexpr(WINDOW_TOKENS)


@triton.jit
def kv_head_of(bh, Hq, Hkv):
    """Sequence of query head bh, and its KV head; bh and the KV head count over all sequences."""
    b = bh // Hq
    return b, b * Hkv + (bh % Hq) // (Hq // Hkv)


@triton.jit
def query_span(offset_ptr, Lq, Lkv):
    """Position of query 0 among the keys, and the one past the last query: the end of the keys.

    They are offset and offset + Lq of a cache longer than its filling, else Lkv - Lq and Lkv.
    """
    if offset_ptr is not None:
        offset = tl.load(offset_ptr).to(tl.int32)
        # at most Lkv by contract; an offset beyond it must not become a read beyond the cache
        reach = tl.minimum(offset + Lq, Lkv)
    else:
        offset = Lkv - Lq
        reach = Lkv
    return offset, reach


@triton.jit
def bounds_of(bounds_ptr, b, reach):
    """Start and end of the valid keys of sequence b; start = Lkv and end = 0 if there are none."""
    if bounds_ptr is not None:
        start = tl.load(bounds_ptr + 2 * b)
        end = tl.load(bounds_ptr + 2 * b + 1)
    else:
        start = tl.full([], 0, tl.int32)
        end = tl.full([], 0, tl.int32) + reach
    return start, end


@triton.jit
def row_ends(row, offset, reach, BLOCK_Q: tl.constexpr):
    """Positions of the first and the last query of query blocks row."""
    q_first = row * BLOCK_Q + offset
    return q_first, tl.minimum(q_first + (BLOCK_Q - 1), reach - 1)


@triton.jit
def tile_extent(row, there, offset, reach, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr):
    """row_ends of query blocks row [R], and the number of key blocks up to the last one they see.

    The last position is -1 where a row is not there, so that it sees nothing.
    """
    q_first, q_last = row_ends(row, offset, reach, BLOCK_Q)
    q_last = tl.where(there, q_last, -1)
    return q_first, q_last, tl.max(q_last, 0) // BLOCK_KV + 1


@triton.jit
def block_of_start(start, Nkv, BLOCK_KV: tl.constexpr):
    """Key block of the first valid key, in range also where there is none."""
    return tl.minimum(start // BLOCK_KV, Nkv - 1)


@triton.jit
def audit_block(start, end, offset, Nq, step, count, BLOCK_Q: tl.constexpr):
    """Query block audited at step 0 .. count - 1, as in Geometry.audit_blocks."""
    first = tl.maximum(start, offset)
    queries = tl.maximum(end - first, 0)
    tokens = (queries * (step + 1) + (count - 1)) // count
    block = tl.maximum(first - offset + tokens - 1, 0) // BLOCK_Q
    return tl.minimum(block, Nq - 1)


@triton.jit
def audit_range(start, end, offset, Nq, step, count, BLOCK_Q: tl.constexpr):
    """Position of the first row of an audit block, and the range [lo, hi) of rows that count."""
    block = audit_block(start, end, offset, Nq, step, count, BLOCK_Q)
    return block * BLOCK_Q + offset, start, end


@triton.jit
def proxy_range(start, end, offset, Lq):
    """Position of the first proxy row, and the range [lo, hi) of rows that count."""
    lo = tl.maximum(tl.maximum(end - WINDOW, start), offset)
    return end - tl.minimum(Lq, WINDOW), lo, end


@triton.jit
def key_blocks_seen(first, lo, hi, ROWS: tl.constexpr, BLOCK_KV: tl.constexpr):
    """Key blocks up to the last one that a counting row among ROWS from first on sees."""
    last = tl.minimum(first + ROWS, hi) - 1
    return tl.where(last >= tl.maximum(first, lo), tl.maximum(last, 0) // BLOCK_KV + 1, 0)


@triton.jit
def own_bin(first, ROWS: tl.constexpr, BLOCK_KV: tl.constexpr):
    """first // block_kv rounded down, for first >= -ROWS: the key block in which first lies."""
    shift = (ROWS + BLOCK_KV - 1) // BLOCK_KV
    return (first + shift * BLOCK_KV) // BLOCK_KV - shift


@triton.jit
def first_keys(first_valid_ptr, b, blk, Nkv, BLOCK_KV: tl.constexpr):
    """First valid key of key blocks blk, past every position if there is none."""
    if first_valid_ptr is not None:
        row_ptr = first_valid_ptr + b.to(tl.int64) * Nkv
        key = tl.load(row_ptr + blk, mask=blk < Nkv, other=2147483647)
    else:
        key = tl.where(blk < Nkv, blk * BLOCK_KV, 2147483647)
    return key


@triton.jit
def row_extent(
    first_valid_ptr, b, q_last, limit, Nkv, BLOCK_KV: tl.constexpr, BLOCK_J: tl.constexpr
):
    """Last visible key block (-1: none) and number of visible ones of rows q_last [R] int32.

    Blocks from limit on are visible to none of the rows.
    """
    if first_valid_ptr is not None:
        last = tl.zeros_like(q_last) - 1
        count = tl.zeros_like(q_last)
        for j in range(0, limit, BLOCK_J):
            blk = j + tl.arange(0, BLOCK_J)
            keys = first_keys(first_valid_ptr, b, blk, Nkv, BLOCK_KV)
            visible = keys[None, :] <= q_last[:, None]  # [R, BLOCK_J]
            last = tl.maximum(last, tl.max(tl.where(visible, blk[None, :], -1), 1))
            count += tl.sum(visible.to(tl.int32), 1)
    else:
        last = q_last // BLOCK_KV
        count = last + 1
    return last, count
