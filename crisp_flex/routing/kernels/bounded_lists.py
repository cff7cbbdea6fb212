"""Stages `select` and `compact` of policy "bounded" on the GPU: the blocks above each row's level.

Oracle: policies.bounded, guards.finish_rows and reference.compact. A row of the estimate is read
once and kept in registers; bound by latency, and by the writes where many blocks are kept.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from crisp_flex.routing.kernels.compact import Lists, append_blocks, dense_rows
from crisp_flex.routing.kernels.layout import Layout
from crisp_flex.routing.kernels.left_out import always_kept, level_of, row_masses
from crisp_flex.routing.kernels.positions import block_of_start, bounds_of, query_span, row_ends
from crisp_flex.routing.params import RouteParams

# Key blocks of a row that one warp holds; 32 lanes take 16 each.
_BLOCKS_PER_WARP = 512


def bounded_lists(sums: Tensor, share: Tensor, layout: Layout, params: RouteParams) -> Lists:
    """Lists of the blocks that hold all of a row's estimated mass but the head's share.

    Args:
        sums: Of the stage `estimate`.
        share: [B, Hq] fp32, -1 for all blocks.
        layout: Of this call.
        params: dense_last_blocks.
    """
    x = layout
    lists = Lists.empty(layout, sums.device)
    N = int(triton.next_power_of_2(x.Nkv))
    _lists_kernel[(x.Nq, x.B * x.Hq)](
        sums,
        share,
        lists.counts,
        lists.buffer,
        lists.full_counts,
        x.first_valid,
        x.all_valid,
        x.bounds,
        x.q_offset,
        x.Hq,
        x.Lq,
        x.Lkv,
        lists.P,
        params.dense_last_blocks,
        BLOCK_Q=x.block_q,
        BLOCK_KV=x.block_kv,
        N=N,
        num_warps=min(max(N // _BLOCKS_PER_WARP, 1), 8),
    )
    return lists


@triton.jit(do_not_specialize=["Hq", "Lq", "Lkv", "P", "dense_last_blocks"])
def _lists_kernel(
    sums_ptr,
    share_ptr,
    counts_ptr,
    buffer_ptr,
    full_counts_ptr,
    first_valid_ptr,
    all_valid_ptr,
    bounds_ptr,
    offset_ptr,
    Hq,
    Lq,
    Lkv,
    P,
    dense_last_blocks,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    N: tl.constexpr,
):
    """Grid (Nq, B * Hq)."""
    row = tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)  # before the first multiply
    b = bh // Hq
    Nq, Nkv = tl.cdiv(Lq, BLOCK_Q), tl.cdiv(Lkv, BLOCK_KV)
    offset, reach = query_span(offset_ptr, Lq, Lkv)
    start, end = bounds_of(bounds_ptr, b, reach)
    q_first, q_last = row_ends(row, offset, reach, BLOCK_Q)
    blk, visible, logs, _ = row_masses(
        sums_ptr, first_valid_ptr, b, (bh * Nq + row) * Nkv, q_last, Nkv, BLOCK_KV, N
    )
    level = level_of(logs, tl.load(share_ptr + bh))
    last_block = tl.max(tl.where(visible, blk, -1), 0)
    first_block = block_of_start(start, Nkv, BLOCK_KV)
    keep = ~(logs <= level)
    keep = keep | always_kept(blk, q_first, q_last, first_block, last_block, BLOCK_Q, BLOCK_KV)
    keep = keep | dense_rows(row, dense_last_blocks, end, offset, BLOCK_Q)
    keep = keep & (q_last >= start) & (q_first < end)
    keep = (keep | (blk == last_block)) & visible
    none = tl.zeros([1], tl.int32)
    row_ptrs = (buffer_ptr + (bh * Nq + row) * (P + Nkv)) + none[:, None]
    partials, fulls = append_blocks(
        keep[None, :], blk, q_first + none, row_ptrs, none, none, all_valid_ptr, b, Lkv, Nkv, P,
        BLOCK_KV,
    )  # fmt: skip
    one = tl.arange(0, 1)
    tl.store(counts_ptr + bh * Nq + row + one, partials)
    tl.store(full_counts_ptr + bh * Nq + row + one, fulls)
