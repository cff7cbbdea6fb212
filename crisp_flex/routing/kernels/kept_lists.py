"""Stages `guards` and `compact` of policies without an audit: their blocks as lists.

Oracle: guards.finish_rows and reference.compact. Bound by the writes of the lists; a
pooled-estimate head makes its map once more.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from crisp_flex.routing.kernels.compact import Lists, append_blocks, dense_rows
from crisp_flex.routing.kernels.crisp_estimate import LEVELS, TILE_ROWS
from crisp_flex.routing.kernels.kept import Rule, kept_blocks, lowest_entry
from crisp_flex.routing.kernels.layout import Layout
from crisp_flex.routing.kernels.positions import (
    block_of_start,
    bounds_of,
    first_keys,
    kv_head_of,
    query_span,
    row_extent,
    tile_extent,
)
from crisp_flex.routing.params import RouteParams

# Rows a program: few where there are few blocks, so that there are programs.
LIST_ROWS = 64
SHORT_LIST_ROWS = 16
BLOCK_J = 32
NUM_WARPS = 4


def kept_lists(
    rule: Rule,
    covered: Tensor | None,
    layout: Layout,
    params: RouteParams,
    *,
    device: torch.device,
) -> Lists:
    """Lists of the blocks that the rule and the guards keep.

    Args:
        rule: Of the policy.
        covered: [B, Hq, 2] fp32, mass kept and all mass of the proxy rows; None for policy
            "dense", which keeps all visible blocks of every row.
        layout: Of this call.
        params: max_uncovered and dense_last_blocks.
        device: Of the call.
    """
    x = layout
    lists = Lists.empty(layout, device)
    rows = LIST_ROWS if x.Nq >= 256 else SHORT_LIST_ROWS
    _lists_kernel[(triton.cdiv(x.Nq, rows), x.B * x.Hq)](
        *rule.tensors,
        covered,
        lists.counts,
        lists.buffer,
        lists.full_counts,
        x.first_valid,
        x.all_valid,
        x.bounds,
        x.q_offset,
        x.B * x.Hq,
        x.Hq,
        x.Hkv,
        x.Lq,
        x.Lkv,
        lists.P,
        *rule.numbers,
        params.max_uncovered,
        params.dense_last_blocks,
        D=x.D,
        BLOCK_D=x.BLOCK_D,
        BLOCK_Q=x.block_q,
        BLOCK_KV=x.block_kv,
        PHASES=x.phases,
        SMALL=rule.small_row_blocks,
        LEVELS=LEVELS,
        ROWS=rows,
        BLOCK_J=BLOCK_J,
        num_warps=NUM_WARPS,
    )
    return lists


@triton.jit(
    do_not_specialize=[
        "heads", "Hq", "Hkv", "Lq", "Lkv", "P", "recent_blocks", "dense_last_blocks",
    ]
)  # fmt: skip
def _lists_kernel(
    route_ptr,
    verticals_ptr,
    slashes_ptr,
    mean_q_ptr,
    mean_k_ptr,
    row_log2_ptr,
    above_ptr,
    covered_ptr,
    counts_ptr,
    buffer_ptr,
    full_counts_ptr,
    first_valid_ptr,
    all_valid_ptr,
    bounds_ptr,
    offset_ptr,
    heads,
    Hq,
    Hkv,
    Lq,
    Lkv,
    P,
    exponent,
    gamma,
    octaves,
    recent_blocks,
    max_uncovered,
    dense_last_blocks,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    PHASES: tl.constexpr,
    SMALL: tl.constexpr,
    LEVELS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    """Grid (tiles of query blocks, B * Hq); the longest rows first."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)  # before the first multiply
    b, kv_head = kv_head_of(bh, Hq, Hkv)
    Nq, Nkv = tl.cdiv(Lq, BLOCK_Q), tl.cdiv(Lkv, BLOCK_KV)
    offset, reach = query_span(offset_ptr, Lq, Lkv)
    start, end = bounds_of(bounds_ptr, b, reach)
    low = lowest_entry(
        route_ptr, above_ptr, heads, bh, tl.cdiv(Nq, TILE_ROWS), gamma, octaves, LEVELS
    )
    row = tile * ROWS + tl.arange(0, ROWS)
    there = row < Nq
    q_first, q_last, limit = tile_extent(row, there, offset, reach, BLOCK_Q, BLOCK_KV)
    first_block = block_of_start(start, Nkv, BLOCK_KV)
    last_block, count = row_extent(first_valid_ptr, b, q_last, limit, Nkv, BLOCK_KV, BLOCK_J)

    live = (q_last >= start) & (q_first < end)
    all_rows = dense_last_blocks
    if covered_ptr is not None:
        # so put that a coverage of NaN is not enough
        enough = 1 - tl.load(covered_ptr + bh * 2) <= max_uncovered
        all_rows = tl.where(enough, all_rows, Nq)
    all_blocks = dense_rows(row, all_rows, end, offset, BLOCK_Q)

    row_ptrs = (buffer_ptr + (bh * Nq + row) * (P + Nkv))[:, None]
    partials = tl.zeros([ROWS], tl.int32)
    fulls = tl.zeros([ROWS], tl.int32)
    for j in range(0, limit, BLOCK_J):
        blk = j + tl.arange(0, BLOCK_J)
        keys = first_keys(first_valid_ptr, b, blk, Nkv, BLOCK_KV)
        visible = keys[None, :] <= q_last[:, None]
        keep = visible
        if covered_ptr is not None:
            keep = kept_blocks(
                route_ptr, verticals_ptr, slashes_ptr, mean_q_ptr, mean_k_ptr, row_log2_ptr,
                exponent, recent_blocks, low, bh, kv_head, row, blk, visible, offset,
                first_block, last_block, count, Nq, Nkv,
                D, BLOCK_D, BLOCK_Q, BLOCK_KV, PHASES, SMALL,
            )  # fmt: skip
            keep = (keep | all_blocks[:, None]) & live[:, None]
            keep = (keep | (blk[None, :] == last_block[:, None])) & visible
        partials, fulls = append_blocks(
            keep, blk, q_first, row_ptrs, partials, fulls, all_valid_ptr, b, Lkv, Nkv, P, BLOCK_KV
        )
    tl.store(counts_ptr + bh * Nq + row, partials, mask=there)
    tl.store(full_counts_ptr + bh * Nq + row, fulls, mask=there)
