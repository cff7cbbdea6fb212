"""Stages `guards` and `compact` of policies without an audit: their blocks as lists.

Oracle: guards.finish_rows and reference.compact. Bound by the writes of the lists; a
pooled-estimate head makes its map once more.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from crisp_flex.routing.geometry import partial_slots
from crisp_flex.routing.kernels.crisp_estimate import LEVELS, TILE_ROWS
from crisp_flex.routing.kernels.kept import Rule, kept_blocks, lowest_entry
from crisp_flex.routing.kernels.layout import Layout, bounds_of, first_keys, row_extent
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Lists of the blocks that the rule and the guards keep.

    Args:
        rule: Of the policy.
        covered: [B, Hq, 2] fp32, mass kept and all mass of the proxy rows; None for policy
            "dense", which keeps all visible blocks of every row.
        layout: Of this call.
        params: max_uncovered and dense_last_blocks.
        device: Of the call.

    Returns:
        kv_num_blocks: [B, Hq, Nq] int32.
        kv_buffer: [B, Hq, Nq, P + Nkv] int32; partial list from slot 0, full list from slot P,
            0 elsewhere.
        full_kv_num_blocks: [B, Hq, Nq] int32.
    """
    x = layout
    P = partial_slots(x.block_q, x.block_kv, x.Lq, x.Lkv, x.key_valid is not None)
    counts, full_counts = (
        torch.empty((x.B, x.Hq, x.Nq), dtype=torch.int32, device=device) for _ in range(2)
    )
    # zeros, not empty: what a consumer must not rely on is at least the same on every run
    buffer = counts.new_zeros((x.B, x.Hq, x.Nq, P + x.Nkv))
    rows = LIST_ROWS if x.Nq >= 256 else SHORT_LIST_ROWS
    _lists_kernel[(triton.cdiv(x.Nq, rows), x.B * x.Hq)](
        *rule.tensors,
        covered,
        counts,
        buffer,
        full_counts,
        x.first_valid,
        x.all_valid,
        x.bounds,
        x.B * x.Hq,
        x.Hq,
        x.Hkv,
        x.Lq,
        x.Lkv,
        P,
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
    return counts, buffer, full_counts


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
    b = bh // Hq
    kv_head = b * Hkv + (bh % Hq) // (Hq // Hkv)
    Nq, Nkv = tl.cdiv(Lq, BLOCK_Q), tl.cdiv(Lkv, BLOCK_KV)
    offset = Lkv - Lq
    start, end = bounds_of(bounds_ptr, b, Lkv)
    low = lowest_entry(
        route_ptr, above_ptr, heads, bh, tl.cdiv(Nq, TILE_ROWS), gamma, octaves, LEVELS
    )
    row = tile * ROWS + tl.arange(0, ROWS)
    there = row < Nq
    q_first = row * BLOCK_Q + offset
    q_last = tl.where(there, tl.minimum(q_first + (BLOCK_Q - 1), Lkv - 1), -1)
    limit = tl.max(q_last, 0) // BLOCK_KV + 1
    first_block = tl.minimum(start // BLOCK_KV, Nkv - 1)
    last_block, count = row_extent(first_valid_ptr, b, q_last, limit, Nkv, BLOCK_KV, BLOCK_J)

    live = (q_last >= start) & (q_first < end)
    last_row = tl.where(end > offset, (end - 1 - offset) // BLOCK_Q, -1)
    all_rows = dense_last_blocks
    if covered_ptr is not None:
        all_rows = tl.where(1 - tl.load(covered_ptr + bh * 2) > max_uncovered, Nq, all_rows)
    all_blocks = (row > last_row - all_rows) & (row <= last_row)

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
        full = (tl.minimum(blk * BLOCK_KV + (BLOCK_KV - 1), Lkv - 1))[None, :] <= q_first[:, None]
        if all_valid_ptr is not None:
            whole = tl.load(all_valid_ptr + b * Nkv + blk, mask=blk < Nkv, other=0) != 0
            full = full & whole[None, :]
        # ascending: the rank of a block is the number of kept ones before it, of its own kind;
        # both numbers in one scan, the partial ones in the upper half
        ones = tl.where(keep, tl.where(full, 1, 1 << 16), 0)
        ranks = tl.cumsum(ones, 1)
        full_slot = P - 1 + fulls[:, None] + (ranks & 0xFFFF)
        slot = tl.where(full, full_slot, partials[:, None] - 1 + (ranks >> 16))
        blocks = blk[None, :] + tl.zeros([ROWS, BLOCK_J], tl.int32)
        tl.store(row_ptrs + slot, blocks, mask=keep)
        kept = tl.sum(ones, 1)
        partials += kept >> 16
        fulls += kept & 0xFFFF
    tl.store(counts_ptr + bh * Nq + row, partials, mask=there)
    tl.store(full_counts_ptr + bh * Nq + row, fulls, mask=there)
