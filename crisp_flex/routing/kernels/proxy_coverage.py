"""Stage `coverage` of policies without an audit: mass of the proxy rows that the selection keeps.

Oracle: guards.proxy_coverage. Reads vectors of Nkv per head, and for a pooled-estimate head the
pooled keys; bound by latency.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from crisp_flex.routing.kernels.crisp_estimate import LEVELS, TILE_ROWS
from crisp_flex.routing.kernels.kept import Rule, kept_blocks, lowest_entry
from crisp_flex.routing.kernels.layout import Layout
from crisp_flex.routing.kernels.masses import Masses
from crisp_flex.routing.kernels.positions import (
    block_of_start,
    bounds_of,
    first_keys,
    kv_head_of,
    query_span,
    row_extent,
    tile_extent,
)

# Rows of a tile: the query blocks of the proxy rows, padded to what tl.dot takes.
SLOT_ROWS = tl.constexpr(16)
BLOCK_J = 64
NUM_WARPS = 4


def proxy_coverage(measured: Masses, rule: Rule, layout: Layout) -> Tensor:
    """[B, Hq, 2] fp32: mass that the rule keeps on the proxy rows, and all of their mass.

    Both are 1 for a sequence without valid queries, and NaN if a row's masses are unknown.

    Args:
        measured: Masses with by_slot.
        rule: Of the policy.
        layout: Of this call.
    """
    x = layout
    covered = torch.empty((x.B, x.Hq, 2), dtype=torch.float32, device=measured.mass.device)
    _coverage_kernel[(x.B * x.Hq,)](
        *rule.tensors,
        measured.by_slot,
        covered,
        x.first_valid,
        x.bounds,
        x.q_offset,
        x.B * x.Hq,
        x.Hq,
        x.Hkv,
        x.Lq,
        x.Lkv,
        *rule.numbers,
        D=x.D,
        BLOCK_D=x.BLOCK_D,
        BLOCK_Q=x.block_q,
        BLOCK_KV=x.block_kv,
        PHASES=x.phases,
        SMALL=rule.small_row_blocks,
        SLOTS=x.proxy_slots,
        LEVELS=LEVELS,
        BLOCK_J=BLOCK_J,
        num_warps=NUM_WARPS,
    )
    return covered


@triton.jit(do_not_specialize=["heads", "Hq", "Hkv", "Lq", "Lkv", "recent_blocks"])
def _coverage_kernel(
    route_ptr,
    verticals_ptr,
    slashes_ptr,
    mean_q_ptr,
    mean_k_ptr,
    row_log2_ptr,
    above_ptr,
    slot_ptr,
    covered_ptr,
    first_valid_ptr,
    bounds_ptr,
    offset_ptr,
    heads,
    Hq,
    Hkv,
    Lq,
    Lkv,
    exponent,
    gamma,
    octaves,
    recent_blocks,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    PHASES: tl.constexpr,
    SMALL: tl.constexpr,
    SLOTS: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    """Grid (B * Hq,)."""
    bh = tl.program_id(0).to(tl.int64)  # before the first multiply
    b, kv_head = kv_head_of(bh, Hq, Hkv)
    Nq, Nkv = tl.cdiv(Lq, BLOCK_Q), tl.cdiv(Lkv, BLOCK_KV)
    offset, reach = query_span(offset_ptr, Lq, Lkv)
    start, end = bounds_of(bounds_ptr, b, reach)
    low = lowest_entry(
        route_ptr, above_ptr, heads, bh, tl.cdiv(Nq, TILE_ROWS), gamma, octaves, LEVELS
    )
    slot = tl.arange(0, SLOT_ROWS)
    row = tl.maximum(end - 1 - offset, 0) // BLOCK_Q - slot
    there = (slot < SLOTS) & (row >= 0)
    row = tl.maximum(row, 0)
    _, q_last, limit = tile_extent(row, there, offset, reach, BLOCK_Q, BLOCK_KV)
    first_block = block_of_start(start, Nkv, BLOCK_KV)
    last_block, count = row_extent(first_valid_ptr, b, q_last, limit, Nkv, BLOCK_KV, BLOCK_J)
    kept = tl.zeros([SLOT_ROWS], tl.float32)
    every = tl.zeros([SLOT_ROWS], tl.float32)
    for j in range(0, limit, BLOCK_J):
        blk = j + tl.arange(0, BLOCK_J)
        keys = first_keys(first_valid_ptr, b, blk, Nkv, BLOCK_KV)
        visible = keys[None, :] <= q_last[:, None]
        keep = kept_blocks(
            route_ptr, verticals_ptr, slashes_ptr, mean_q_ptr, mean_k_ptr, row_log2_ptr, exponent,
            recent_blocks, low, bh, kv_head, row, blk, visible, offset, first_block, last_block,
            count, Nq, Nkv, D, BLOCK_D, BLOCK_Q, BLOCK_KV, PHASES, SMALL,
        )  # fmt: skip
        slot_ptrs = slot_ptr + (bh * SLOTS + slot)[:, None] * Nkv + blk[None, :]
        mass = tl.load(slot_ptrs, mask=visible, other=0.0)
        kept += tl.sum(tl.where(keep, mass, 0.0), 1)
        every += tl.sum(mass, 1)
    has_rows = end > tl.maximum(start, offset)
    tl.store(covered_ptr + bh * 2, tl.where(has_rows, tl.sum(kept, 0), 1.0))
    tl.store(covered_ptr + bh * 2 + 1, tl.where(has_rows, tl.sum(every, 0), 1.0))
