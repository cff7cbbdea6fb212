"""What the stage `stats` of all policies shares: the counts of a head, and its row.

Oracle: reference.Selection.stats.
"""

from __future__ import annotations

import triton
import triton.language as tl

from crisp_flex.routing.kernels.positions import first_keys, query_span


@triton.jit
def block_counts(
    counts_ptr, full_counts_ptr, first_valid_ptr, offset_ptr, bh, b, Lq, Lkv, BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """fp32 numbers of kept and of visible blocks of head bh, in all rows together."""
    Nq, Nkv = tl.cdiv(Lq, BLOCK_Q), tl.cdiv(Lkv, BLOCK_KV)
    offset, reach = query_span(offset_ptr, Lq, Lkv)
    kept = tl.zeros([CHUNK], tl.int32)
    for i in range(0, Nq, CHUNK):
        row = i + tl.arange(0, CHUNK)
        kept += tl.load(counts_ptr + bh * Nq + row, mask=row < Nq, other=0)
        kept += tl.load(full_counts_ptr + bh * Nq + row, mask=row < Nq, other=0)
    visible = tl.zeros([CHUNK], tl.int32)
    for j in range(0, Nkv, CHUNK):
        blk = j + tl.arange(0, CHUNK)
        keys = first_keys(first_valid_ptr, b, blk, Nkv, BLOCK_KV)
        # visible to all rows from the one on whose last query is at or past the first valid key
        first_row = tl.maximum(keys - offset, 0) // BLOCK_Q
        visible += tl.where(keys < reach, Nq - first_row, 0)
    return tl.sum(kept, 0).to(tl.float32), tl.sum(visible, 0).to(tl.float32)


@triton.jit
def store_stats(
    out_ptr, bh, kept, visible, c_struct, coverage, multiple, route, COLUMNS: tl.constexpr,
    NOT_MEASURED: tl.constexpr,
):  # fmt: skip
    """Store the statistics of head bh in the order of STAT_NAMES; none of them is NaN."""
    out_ptr += bh * COLUMNS
    tl.store(out_ptr, kept)
    tl.store(out_ptr + 1, visible)
    tl.store(out_ptr + 2, tl.where(c_struct == c_struct, c_struct, NOT_MEASURED))
    # unknown masses are in all blocks
    tl.store(out_ptr + 3, tl.where(coverage == coverage, coverage, 1.0))
    tl.store(out_ptr + 4, multiple)
    tl.store(out_ptr + 5, route)
