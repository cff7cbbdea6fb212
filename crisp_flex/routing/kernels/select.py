"""Stages `select` and `compact` on the GPU: the kept blocks of each row, straight into the lists.

Oracle: policies.hybrid, guards.finish_rows and reference.compact. The pooled map is made twice, a
tile at a time: once for the maximum, sum and floor of each row, once for the decisions. Bound by
the dots of the map, and by the writes of the lists where many blocks are kept.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from crisp_flex.routing.kernels.audit import COVERAGE_MARGIN, Audit
from crisp_flex.routing.kernels.compact import Lists, append_blocks, dense_rows
from crisp_flex.routing.kernels.layout import Layout
from crisp_flex.routing.kernels.levels import MULTIPLES
from crisp_flex.routing.kernels.lines import choose_level, row_threshold
from crisp_flex.routing.kernels.pooled import SplitKeys, load_rows, pooled_logits
from crisp_flex.routing.kernels.positions import (
    block_of_start,
    bounds_of,
    first_keys,
    kv_head_of,
    query_span,
    row_extent,
    tile_extent,
)
from crisp_flex.routing.kernels.tile import LOG2_E
from crisp_flex.routing.params import RouteParams

# Rows a program: few where there are few blocks, so that there are programs. H200, 2026-11-30,
# bench_route --sweep (32/8 heads, D 128): the best or next to it of eleven at 8k, 32k and 128k.
TILE_ROWS = 64
SHORT_TILE_ROWS = 16
BLOCK_J = 64
NUM_WARPS = 4
NUM_STAGES = 1


def select(
    mean_query: Tensor, keys: SplitKeys, audited: Audit, layout: Layout, params: RouteParams
) -> Lists:
    """Lists of the blocks kept by both views, the guards and the geometry.

    Args:
        mean_query: [B, Hq, Nq, D] fp32, contiguous.
        keys: The pooled keys.
        audited: Levels of the lines, coverage of the multiples.
        layout: Of this call.
        params: Scale, target and dense_last_blocks.
    """
    x = layout
    lists = Lists.empty(layout, mean_query.device)
    tile_rows = TILE_ROWS if x.Nq >= 256 else SHORT_TILE_ROWS
    audits = audited.coverage.shape[2]
    _select_kernel[(triton.cdiv(x.Nq, tile_rows), x.B * x.Hq)](
        mean_query,
        keys.parts,
        keys.scale,
        audited.levels.verticals,
        audited.levels.slashes,
        audited.coverage,
        lists.counts,
        lists.buffer,
        lists.full_counts,
        x.first_valid,
        x.all_valid,
        x.bounds,
        x.q_offset,
        x.Hq,
        x.Hkv,
        x.Lq,
        x.Lkv,
        lists.P,
        params.scale * LOG2_E.value,
        params.coverage + COVERAGE_MARGIN,
        params.dense_last_blocks,
        D=x.D,
        BLOCK_D=x.BLOCK_D,
        BLOCK_Q=x.block_q,
        BLOCK_KV=x.block_kv,
        PHASES=x.phases,
        MULTIPLES=MULTIPLES,
        AUDITS=audits,
        AUDIT_SLOTS=triton.next_power_of_2(audits),
        MINIMUM=params.coverage_reduce == "min",
        TILE_I=tile_rows,
        BLOCK_J=BLOCK_J if x.BLOCK_D <= 128 else BLOCK_J // 2,
        NUM_STAGES=NUM_STAGES,
        num_warps=NUM_WARPS,
    )
    return lists


@triton.jit(do_not_specialize=["Hq", "Hkv", "Lq", "Lkv", "P", "dense_last_blocks"])
def _select_kernel(
    mean_q_ptr,
    parts_ptr,
    scale_ptr,
    verticals_ptr,
    slashes_ptr,
    coverage_ptr,
    counts_ptr,
    buffer_ptr,
    full_counts_ptr,
    first_valid_ptr,
    all_valid_ptr,
    bounds_ptr,
    offset_ptr,
    Hq,
    Hkv,
    Lq,
    Lkv,
    P,
    exponent,
    target,
    dense_last_blocks,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    PHASES: tl.constexpr,
    MULTIPLES: tl.constexpr,
    AUDITS: tl.constexpr,
    AUDIT_SLOTS: tl.constexpr,
    MINIMUM: tl.constexpr,
    TILE_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Grid (tiles of query blocks, B * Hq); the longest rows first."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)  # before the first multiply
    b, kv_head = kv_head_of(bh, Hq, Hkv)
    Nq, Nkv = tl.cdiv(Lq, BLOCK_Q), tl.cdiv(Lkv, BLOCK_KV)
    offset, reach = query_span(offset_ptr, Lq, Lkv)
    start, end = bounds_of(bounds_ptr, b, reach)
    needed, _ = choose_level(coverage_ptr + bh * AUDITS * 8, target, AUDITS, AUDIT_SLOTS, MINIMUM)
    multiple = tl.zeros([TILE_I], tl.float32)
    for i in tl.static_range(7):
        multiple = tl.where(needed == i + 1, MULTIPLES[i], multiple)

    row = tile * TILE_I + tl.arange(0, TILE_I)
    there = row < Nq
    q_first, q_last, limit = tile_extent(row, there, offset, reach, BLOCK_Q, BLOCK_KV)
    first_block = block_of_start(start, Nkv, BLOCK_KV)
    last_block, count = row_extent(first_valid_ptr, b, q_last, limit, Nkv, BLOCK_KV, BLOCK_J)
    last_block = last_block[:, None]
    mean_hi, mean_lo, factor = load_rows(mean_q_ptr, bh * Nq + row, there, D, BLOCK_D)
    factor *= exponent
    low_stride = (tl.num_programs(1) // Hq * Hkv).to(tl.int64) * Nkv * D
    parts_ptr += kv_head * Nkv * D
    scale_ptr += kv_head * Nkv

    top = tl.full([TILE_I], float("-inf"), tl.float32)
    total = tl.zeros([TILE_I], tl.float32)
    rest = tl.zeros([TILE_I], tl.float32)
    for j in tl.range(0, limit, BLOCK_J, num_stages=NUM_STAGES):
        blk = j + tl.arange(0, BLOCK_J)
        keys = first_keys(first_valid_ptr, b, blk, Nkv, BLOCK_KV)
        logits = pooled_logits(
            mean_hi, mean_lo, factor, parts_ptr, low_stride, scale_ptr, blk, Nkv, D, BLOCK_D
        )
        logits = tl.where(keys[None, :] <= q_last[:, None], logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(logits - base[:, None])  # [TILE_I, BLOCK_J]
        old = tl.exp2(top - base)
        ends = (blk[None, :] == first_block) | (blk[None, :] == last_block)
        total = total * old + tl.sum(weights, 1)
        rest = rest * old + tl.sum(tl.where(ends, 0.0, weights), 1)
        top = new_top
    base = tl.where(top == float("-inf"), 0.0, top)
    threshold = multiple * row_threshold(rest, total, count)

    hi = ((q_first + (BLOCK_Q - 1)) // BLOCK_KV)[:, None]
    live = (q_last >= start) & (q_first < end)
    all_blocks = (needed == 0) | dense_rows(row, dense_last_blocks, end, offset, BLOCK_Q)
    verticals_ptr += bh * Nkv
    slash_ptrs = slashes_ptr + bh * PHASES * (Nkv + 2) + ((row % PHASES) * (Nkv + 2))[:, None]
    row_ptrs = (buffer_ptr + (bh * Nq + row) * (P + Nkv))[:, None]
    partials = tl.zeros([TILE_I], tl.int32)
    fulls = tl.zeros([TILE_I], tl.int32)
    for j in tl.range(0, limit, BLOCK_J, num_stages=NUM_STAGES):
        blk = j + tl.arange(0, BLOCK_J)
        keys = first_keys(first_valid_ptr, b, blk, Nkv, BLOCK_KV)
        visible = keys[None, :] <= q_last[:, None]
        logits = pooled_logits(
            mean_hi, mean_lo, factor, parts_ptr, low_stride, scale_ptr, blk, Nkv, D, BLOCK_D
        )
        # so put that a row of NaN keeps all it sees
        keep = ~(tl.exp2(logits - base[:, None]) <= threshold[:, None])
        level = tl.load(verticals_ptr + blk, mask=blk < Nkv, other=0)[None, :]
        level = tl.maximum(level, tl.load(slash_ptrs + (hi - blk[None, :]), mask=visible, other=0))
        keep = keep | (level >= needed) | (blk[None, :] == first_block)
        keep = (keep | all_blocks[:, None]) & live[:, None]
        keep = (keep | (blk[None, :] == last_block)) & visible
        partials, fulls = append_blocks(
            keep, blk, q_first, row_ptrs, partials, fulls, all_valid_ptr, b, Lkv, Nkv, P, BLOCK_KV
        )
    tl.store(counts_ptr + bh * Nq + row, partials, mask=there)
    tl.store(full_counts_ptr + bh * Nq + row, fulls, mask=there)
