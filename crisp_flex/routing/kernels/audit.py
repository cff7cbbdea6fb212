"""Stage `audit` on the GPU: line levels of each head, and the coverage at each multiple.

Oracle: routing.lines.select_lines and policies.hybrid. Source of the floor: CRISP, arXiv
2609.01925; its audit is ours. Reads vectors of Nkv per head and, twice, the pooled keys of an
audited row; bound by latency. A level is the number of multiples that a value passes, of the
smallest ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from crisp_flex.routing.kernels.layout import (
    WINDOW,
    Layout,
    audit_block,
    bounds_of,
    first_keys,
    own_bin,
    proxy_range,
    row_extent,
)
from crisp_flex.routing.kernels.lines import (
    always_kept,
    line_level,
    mean_floor,
    slash_kinds,
    slash_mass,
    value_level,
    vertical_kinds,
    vertical_mass,
)
from crisp_flex.routing.kernels.masses import Masses

# Multiples of the floor, as in policies.hybrid: the sparsest last. Level 0 passes none of them.
MULTIPLES = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
# Lines must reach this many times the multiple of the rows.
LINE_FACTOR = 2.0
# The audit asks for this much more than the target, against rounding.
COVERAGE_MARGIN = 1e-4

# Not measured yet. Pooled keys at once, a tile of 64 KiB in registers at most.
TILE_ELEMENTS = 64 * 128
NUM_WARPS = 8


@dataclass(frozen=True, slots=True)
class Audit:
    """What the audit rows say.

    Attributes:
        levels: [B, Hq, 2, Nkv] int8, of verticals by key block and of slashes by bin.
        coverage: [B, Hq, audit_rows, 8] fp32: exact mass kept of each audit row by all blocks and
            at each multiple; -1 for a row that does not count.
    """

    levels: Tensor
    coverage: Tensor


def audit(
    mean_query: Tensor, mean_key: Tensor, measured: Masses, layout: Layout, *, scale: float
) -> Audit:
    """Line levels and the coverage of each multiple of the floor.

    Args:
        mean_query: [B, Hq, Nq, D] fp32, contiguous.
        mean_key: [B, Hkv, Nkv, D] fp32, contiguous.
        measured: Masses of the audited blocks and the proxy rows.
        layout: Of this call.
        scale: Factor on the logits.
    """
    x = layout
    audit_rows = measured.mass.shape[2] - x.planes
    levels = torch.empty((x.B, x.Hq, 2, x.Nkv), dtype=torch.int8, device=mean_query.device)
    coverage = mean_query.new_empty((x.B, x.Hq, audit_rows, 8))
    _audit_kernel[(audit_rows, x.B * x.Hq)](
        mean_query,
        mean_key,
        measured.mass,
        levels,
        coverage,
        x.first_valid,
        x.bounds,
        x.Hq,
        x.Hkv,
        x.Lq,
        x.Lkv,
        scale,
        D=x.D,
        BLOCK_D=x.BLOCK_D,
        BLOCK_Q=x.block_q,
        BLOCK_KV=x.block_kv,
        AUDITS=audit_rows,
        PLANES=x.planes,
        BINS=x.slash_bins,
        MULTIPLES=MULTIPLES,
        LINE_FACTOR=LINE_FACTOR,
        BLOCK_J=max(TILE_ELEMENTS // x.BLOCK_D, 16),
        CHUNK=min(1024, triton.next_power_of_2(x.Nkv)),
        num_warps=NUM_WARPS,
    )
    return Audit(levels, coverage)


@triton.jit(do_not_specialize=["Hq", "Hkv", "Lq", "Lkv"])
def _audit_kernel(
    mean_q_ptr,
    mean_k_ptr,
    mass_ptr,
    levels_ptr,
    coverage_ptr,
    first_valid_ptr,
    bounds_ptr,
    Hq,
    Hkv,
    Lq,
    Lkv,
    scale,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    AUDITS: tl.constexpr,
    PLANES: tl.constexpr,
    BINS: tl.constexpr,
    MULTIPLES: tl.constexpr,
    LINE_FACTOR: tl.constexpr,
    BLOCK_J: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (audit rows, B * Hq). The program of step 0, the shortest row, stores the levels."""
    step = tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)  # before the first multiply
    b = bh // Hq
    kv_head = b * Hkv + (bh % Hq) // (Hq // Hkv)
    Nq, Nkv = tl.cdiv(Lq, BLOCK_Q), tl.cdiv(Lkv, BLOCK_KV)
    offset = Lkv - Lq
    start, end = bounds_of(bounds_ptr, b, Lkv)
    mean_k_ptr += kv_head * Nkv * D
    mass_ptr += bh * (AUDITS + PLANES) * Nkv
    proxy_ptr = mass_ptr + AUDITS * Nkv
    first_proxy, _, _ = proxy_range(start, end, offset, Lq)
    first_bin = own_bin(first_proxy, WINDOW, BLOCK_KV)

    # the floors of both directions
    v_rest = tl.zeros([CHUNK], tl.float32)
    s_rest = tl.zeros([CHUNK], tl.float32)
    v_others = tl.zeros([CHUNK], tl.int32)
    s_others = tl.zeros([CHUNK], tl.int32)
    v_entries = tl.zeros([CHUNK], tl.int32)
    s_entries = tl.zeros([CHUNK], tl.int32)
    for j in range(0, Nkv, CHUNK):
        blk = j + tl.arange(0, CHUNK)
        v_anchor, v_entry = vertical_kinds(first_valid_ptr, b, blk, start, end, Lkv, BLOCK_KV)
        s_anchor, s_entry = slash_kinds(blk, start, end, offset, BLOCK_KV)
        v_candidate, s_candidate = v_entry & ~v_anchor, s_entry & ~s_anchor
        v_rest += tl.where(v_candidate, vertical_mass(proxy_ptr, blk, Nkv, PLANES), 0.0)
        s_rest += tl.where(s_candidate, slash_mass(proxy_ptr, blk, first_bin, Nkv, PLANES), 0.0)
        v_others += v_candidate.to(tl.int32)
        s_others += s_candidate.to(tl.int32)
        v_entries += v_entry.to(tl.int32)
        s_entries += s_entry.to(tl.int32)
    v_floor = mean_floor(tl.sum(v_rest, 0), tl.sum(v_others, 0), tl.sum(v_entries, 0))
    s_floor = mean_floor(tl.sum(s_rest, 0), tl.sum(s_others, 0), tl.sum(s_entries, 0))
    if step == 0:
        for j in range(0, Nkv, CHUNK):
            blk = j + tl.arange(0, CHUNK)
            v_anchor, v_entry = vertical_kinds(first_valid_ptr, b, blk, start, end, Lkv, BLOCK_KV)
            s_anchor, s_entry = slash_kinds(blk, start, end, offset, BLOCK_KV)
            v_mass = vertical_mass(proxy_ptr, blk, Nkv, PLANES)
            s_mass = slash_mass(proxy_ptr, blk, first_bin, Nkv, PLANES)
            v_level = line_level(v_mass, v_floor, v_anchor, v_entry, MULTIPLES, LINE_FACTOR)
            s_level = line_level(s_mass, s_floor, s_anchor, s_entry, MULTIPLES, LINE_FACTOR)
            level_ptrs = levels_ptr + bh * 2 * Nkv + blk
            tl.store(level_ptrs, v_level.to(tl.int8), mask=blk < Nkv)
            tl.store(level_ptrs + Nkv, s_level.to(tl.int8), mask=blk < Nkv)

    # the audited row of the pooled map: its maximum, sum and floor
    row = audit_block(start, end, offset, Nq, step, AUDITS, BLOCK_Q)
    q_first = row * BLOCK_Q + offset
    q_last = tl.minimum(q_first + (BLOCK_Q - 1), Lkv - 1)
    limit = q_last // BLOCK_KV + 1
    first_block = tl.minimum(start // BLOCK_KV, Nkv - 1)
    rows = q_last + tl.arange(0, 1)  # [1]
    last_block, count = row_extent(first_valid_ptr, b, rows, limit, Nkv, BLOCK_KV, CHUNK)
    d = tl.arange(0, BLOCK_D)
    mean_q = tl.load(mean_q_ptr + (bh * Nq + row) * D + d, mask=d < D, other=0.0) * scale
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    rest = tl.zeros([1], tl.float32)
    for j in range(0, limit, BLOCK_J):
        blk = j + tl.arange(0, BLOCK_J)
        visible = first_keys(first_valid_ptr, b, blk, Nkv, BLOCK_KV) <= q_last
        logits = row_logits(mean_q, mean_k_ptr, blk, visible, D, BLOCK_D)
        new_top = tl.maximum(top, tl.max(logits, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp(logits - base)
        old = tl.exp(top - base)
        ends = (blk == first_block) | (blk == last_block)
        total = total * old + tl.sum(weights, 0)
        rest = rest * old + tl.sum(tl.where(ends, 0.0, weights), 0)
        top = new_top
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.where(total > 0, total, 1.0)
    floor = mean_floor(rest / total, count - 2, count)

    # coverage: exact mass of the blocks whose level is above 0 (visible), 1, ... 7
    lo = (q_first + 1) // BLOCK_KV - 1
    hi = (q_first + (BLOCK_Q - 1)) // BLOCK_KV
    thresholds = tl.arange(0, 8)
    covered = tl.zeros([8], tl.float32)
    for j in range(0, limit, BLOCK_J):
        blk = j + tl.arange(0, BLOCK_J)
        visible = first_keys(first_valid_ptr, b, blk, Nkv, BLOCK_KV) <= q_last
        logits = row_logits(mean_q, mean_k_ptr, blk, visible, D, BLOCK_D)
        estimate = tl.exp(logits - base) / total
        level = value_level(estimate, floor, MULTIPLES, 1.0)
        v_anchor, v_entry = vertical_kinds(first_valid_ptr, b, blk, start, end, Lkv, BLOCK_KV)
        v_mass = vertical_mass(proxy_ptr, blk, Nkv, PLANES)
        v_level = line_level(v_mass, v_floor, v_anchor, v_entry, MULTIPLES, LINE_FACTOR)
        level = tl.maximum(level, v_level)
        for i in tl.static_range(BINS):
            bins = lo + i - blk
            s_anchor, s_entry = slash_kinds(bins, start, end, offset, BLOCK_KV)
            touches = (bins >= 0) & (bins < Nkv) & (bins <= hi - blk)
            s_mass = slash_mass(proxy_ptr, bins, first_bin, Nkv, PLANES)
            s_level = line_level(s_mass, s_floor, s_anchor, s_entry, MULTIPLES, LINE_FACTOR)
            level = tl.maximum(level, tl.where(touches, s_level, 0))
        always = always_kept(blk, lo, hi, first_block, last_block, BLOCK_KV)
        level = tl.where(visible, tl.where(always, 7, level) + 1, 0)
        mass = tl.load(mass_ptr + step * Nkv + blk, mask=blk < Nkv, other=0.0)
        kept = level[:, None] > thresholds[None, :]  # [BLOCK_J, 8]
        covered += tl.sum(tl.where(kept, mass[:, None], 0.0), 0)
    before = audit_block(start, end, offset, Nq, step - 1, AUDITS, BLOCK_Q)
    distinct = (end > tl.maximum(start, offset)) & ((step == 0) | (row != before))
    covered = tl.where(distinct, covered, -1.0)
    tl.store(coverage_ptr + (bh * AUDITS + step) * 8 + thresholds, covered)


@triton.jit
def row_logits(mean_q, mean_k_ptr, blk, visible, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Logits of one pooled, scaled query [BLOCK_D] over pooled keys blk, -inf if not visible."""
    d = tl.arange(0, BLOCK_D)
    mean_k = tl.load(
        mean_k_ptr + blk[:, None] * D + d[None, :],
        mask=visible[:, None] & (d < D)[None, :],
        other=0.0,
    )  # [BLOCK_J, BLOCK_D]
    return tl.where(visible, tl.sum(mean_k * mean_q[None, :], 1), float("-inf"))
