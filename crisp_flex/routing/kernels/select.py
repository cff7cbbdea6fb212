"""Stages `select` and `compact` on the GPU: the kept blocks of each row, straight into the lists.

Oracle: policies.hybrid, guards.finish_rows and reference.compact. The pooled map is made twice, a
tile at a time: once for the maximum, sum and floor of each row, once for the decisions. Bound by
the fp32 dots of the map, and by the writes of the lists where many blocks are kept.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from crisp_flex.routing.geometry import partial_slots
from crisp_flex.routing.kernels.audit import COVERAGE_MARGIN, MULTIPLES, Audit
from crisp_flex.routing.kernels.layout import Layout, bounds_of, first_keys, row_extent
from crisp_flex.routing.kernels.lines import always_kept, choose_level, mean_floor
from crisp_flex.routing.params import RouteParams

# Not measured yet. Rows a program: few where there are few blocks, so that there are programs.
TILE_ROWS = 32
SHORT_TILE_ROWS = 16
BLOCK_J = 64
# Head dim at a time: fp32 dots without tensor cores keep their operands in registers.
BLOCK_K = 32
PRECISION = "ieee"
NUM_WARPS = 4
NUM_STAGES = 2


def select(
    mean_query: Tensor, mean_key: Tensor, audited: Audit, layout: Layout, params: RouteParams
) -> tuple[Tensor, Tensor, Tensor]:
    """Lists of the blocks kept by both views, the guards and the geometry.

    Args:
        mean_query: [B, Hq, Nq, D] fp32, contiguous.
        mean_key: [B, Hkv, Nkv, D] fp32, contiguous.
        audited: Levels of the lines, coverage of the multiples.
        layout: Of this call.
        params: Scale, target and dense_last_blocks.

    Returns:
        kv_num_blocks: [B, Hq, Nq] int32.
        kv_buffer: [B, Hq, Nq, P + Nkv] int32; partial list from slot 0, full list from slot
            P, unused slots undefined.
        full_kv_num_blocks: [B, Hq, Nq] int32.
    """
    x = layout
    P = partial_slots(x.block_q, x.block_kv, x.Lq, x.Lkv, x.key_valid is not None)
    counts, full_counts = (
        torch.empty((x.B, x.Hq, x.Nq), dtype=torch.int32, device=mean_query.device)
        for _ in range(2)
    )
    # zeros, not empty: what a consumer must not rely on is at least the same on every run
    buffer = counts.new_zeros((x.B, x.Hq, x.Nq, P + x.Nkv))
    tile_rows = TILE_ROWS if x.Nq >= 256 else SHORT_TILE_ROWS
    audits = audited.coverage.shape[2]
    _select_kernel[(triton.cdiv(x.Nq, tile_rows), x.B * x.Hq)](
        mean_query,
        mean_key,
        audited.levels,
        audited.coverage,
        counts,
        buffer,
        full_counts,
        x.first_valid,
        x.all_valid,
        x.bounds,
        x.Hq,
        x.Hkv,
        x.Lq,
        x.Lkv,
        P,
        params.scale,
        params.coverage + COVERAGE_MARGIN,
        params.dense_last_blocks,
        D=x.D,
        BLOCK_Q=x.block_q,
        BLOCK_KV=x.block_kv,
        BINS=x.slash_bins,
        MULTIPLES=MULTIPLES,
        AUDITS=audits,
        AUDIT_SLOTS=triton.next_power_of_2(audits),
        MINIMUM=params.coverage_reduce == "min",
        TILE_I=tile_rows,
        BLOCK_J=BLOCK_J,
        BLOCK_K=min(BLOCK_K, x.BLOCK_D),
        PRECISION=PRECISION,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )
    return counts, buffer, full_counts


@triton.jit(do_not_specialize=["Hq", "Hkv", "Lq", "Lkv", "P", "dense_last_blocks"])
def _select_kernel(
    mean_q_ptr,
    mean_k_ptr,
    levels_ptr,
    coverage_ptr,
    counts_ptr,
    buffer_ptr,
    full_counts_ptr,
    first_valid_ptr,
    all_valid_ptr,
    bounds_ptr,
    Hq,
    Hkv,
    Lq,
    Lkv,
    P,
    scale,
    target,
    dense_last_blocks,
    D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    BINS: tl.constexpr,
    MULTIPLES: tl.constexpr,
    AUDITS: tl.constexpr,
    AUDIT_SLOTS: tl.constexpr,
    MINIMUM: tl.constexpr,
    TILE_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (tiles of query blocks, B * Hq); the longest rows first."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)  # before the first multiply
    b = bh // Hq
    kv_head = b * Hkv + (bh % Hq) // (Hq // Hkv)
    Nq, Nkv = tl.cdiv(Lq, BLOCK_Q), tl.cdiv(Lkv, BLOCK_KV)
    offset = Lkv - Lq
    start, end = bounds_of(bounds_ptr, b, Lkv)
    needed, _ = choose_level(coverage_ptr + bh * AUDITS * 8, target, AUDITS, AUDIT_SLOTS, MINIMUM)
    multiple = tl.zeros([TILE_I], tl.float32)
    for i in tl.static_range(7):
        multiple = tl.where(needed == i + 1, MULTIPLES[i], multiple)

    row = tile * TILE_I + tl.arange(0, TILE_I)
    there = row < Nq
    q_first = row * BLOCK_Q + offset
    q_last = tl.minimum(q_first + (BLOCK_Q - 1), Lkv - 1)
    limit = tl.max(tl.where(there, q_last, 0), 0) // BLOCK_KV + 1
    first_block = tl.minimum(start // BLOCK_KV, Nkv - 1)
    last_block, count = row_extent(first_valid_ptr, b, q_last, limit, Nkv, BLOCK_KV, BLOCK_J)
    last_block = last_block[:, None]
    mean_q_ptrs = mean_q_ptr + (bh * Nq + row)[:, None] * D
    mean_k_ptr += kv_head * Nkv * D

    top = tl.full([TILE_I], float("-inf"), tl.float32)
    total = tl.zeros([TILE_I], tl.float32)
    rest = tl.zeros([TILE_I], tl.float32)
    for j in range(0, limit, BLOCK_J):
        blk = j + tl.arange(0, BLOCK_J)
        keys = first_keys(first_valid_ptr, b, blk, Nkv, BLOCK_KV)
        visible = keys[None, :] <= q_last[:, None]
        logits = _logits(
            mean_q_ptrs, mean_k_ptr, there, blk, Nkv, scale, visible, D, BLOCK_K, PRECISION
        )
        new_top = tl.maximum(top, tl.max(logits, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp(logits - base[:, None])  # [TILE_I, BLOCK_J]
        old = tl.exp(top - base)
        ends = (blk[None, :] == first_block) | (blk[None, :] == last_block)
        total = total * old + tl.sum(weights, 1)
        rest = rest * old + tl.sum(tl.where(ends, 0.0, weights), 1)
        top = new_top
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.where(total > 0, total, 1.0)
    threshold = multiple * mean_floor(rest / total, count - 2, count)

    lo = ((q_first + 1) // BLOCK_KV - 1)[:, None]
    hi = ((q_first + (BLOCK_Q - 1)) // BLOCK_KV)[:, None]
    live = (q_last >= start) & (q_first < end)
    last_row = tl.where(end > offset, (end - 1 - offset) // BLOCK_Q, -1)
    all_blocks = (needed == 0) | ((row > last_row - dense_last_blocks) & (row <= last_row))
    levels_ptr += bh * 2 * Nkv
    row_ptrs = buffer_ptr + (bh * Nq + row) * (P + Nkv)
    partials = tl.zeros([TILE_I], tl.int32)
    fulls = tl.zeros([TILE_I], tl.int32)
    for j in range(0, limit, BLOCK_J):
        blk = j + tl.arange(0, BLOCK_J)
        keys = first_keys(first_valid_ptr, b, blk, Nkv, BLOCK_KV)
        visible = (keys[None, :] <= q_last[:, None]) & there[:, None]
        logits = _logits(
            mean_q_ptrs, mean_k_ptr, there, blk, Nkv, scale, visible, D, BLOCK_K, PRECISION
        )
        keep = tl.exp(logits - base[:, None]) / total[:, None] > threshold[:, None]
        keep = keep | (tl.load(levels_ptr + blk, mask=blk < Nkv, other=0) >= needed)[None, :]
        for i in tl.static_range(BINS):
            bins = lo + i - blk[None, :]
            touches = (bins >= 0) & (bins < Nkv) & (bins <= hi - blk[None, :]) & visible
            level = tl.load(levels_ptr + Nkv + bins, mask=touches, other=-1)
            keep = keep | (touches & (level >= needed))
        keep = keep | always_kept(blk[None, :], lo, hi, first_block, last_block, BLOCK_KV)
        keep = (keep | all_blocks[:, None]) & live[:, None]
        keep = (keep | (blk[None, :] == last_block)) & visible
        full = (tl.minimum(blk * BLOCK_KV + (BLOCK_KV - 1), Lkv - 1))[None, :] <= q_first[:, None]
        if all_valid_ptr is not None:
            whole = tl.load(all_valid_ptr + b * Nkv + blk, mask=blk < Nkv, other=0) != 0
            full = full & whole[None, :]
        kept_partial, kept_full = (keep & ~full).to(tl.int32), (keep & full).to(tl.int32)
        # ascending: the rank of a block is the number of kept ones before it
        partial_slot = partials[:, None] + tl.cumsum(kept_partial, 1) - 1
        full_slot = fulls[:, None] + tl.cumsum(kept_full, 1) - 1 + P
        slot = tl.where(kept_partial != 0, partial_slot, full_slot)
        blocks = blk[None, :] + tl.zeros([TILE_I, BLOCK_J], tl.int32)
        tl.store(row_ptrs[:, None] + slot, blocks, mask=keep)
        partials += tl.sum(kept_partial, 1)
        fulls += tl.sum(kept_full, 1)
    tl.store(counts_ptr + bh * Nq + row, partials, mask=there)
    tl.store(full_counts_ptr + bh * Nq + row, fulls, mask=there)


@triton.jit
def _logits(
    mean_q_ptrs,
    mean_k_ptr,
    there,
    blk,
    Nkv,
    scale,
    visible,
    D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Logits between pooled queries and pooled keys blk, -inf where not visible."""
    logits = tl.zeros([there.shape[0], blk.shape[0]], tl.float32)
    for start_d in range(0, D, BLOCK_K):
        d = start_d + tl.arange(0, BLOCK_K)
        mean_q = tl.load(
            mean_q_ptrs + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0
        )
        mean_k = tl.load(
            mean_k_ptr + blk[None, :] * D + d[:, None],
            mask=(blk < Nkv)[None, :] & (d < D)[:, None],
            other=0.0,
        )
        logits = tl.dot(mean_q * scale, mean_k, logits, input_precision=PRECISION)
    return tl.where(visible, logits, float("-inf"))
