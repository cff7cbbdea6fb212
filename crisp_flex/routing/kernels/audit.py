"""Stage `audit` on the GPU, second part: the coverage of each multiple on the audited rows.

Oracle: policies.hybrid. The audit is ours; the floor is CRISP's, arXiv 2609.01925. The pooled map
of the audited rows is made once, then read as vectors of Nkv; bound by latency.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from crisp_flex.routing.kernels.layout import Layout
from crisp_flex.routing.kernels.levels import MULTIPLES, Levels, levels
from crisp_flex.routing.kernels.lines import row_threshold, value_level
from crisp_flex.routing.kernels.masses import Masses
from crisp_flex.routing.kernels.pooled import SplitKeys, load_rows, pooled_logits
from crisp_flex.routing.kernels.positions import (
    audit_block,
    block_of_start,
    bounds_of,
    first_keys,
    query_span,
    row_ends,
)
from crisp_flex.routing.kernels.tile import LOG2_E

# The audit asks for this much more than the target, against rounding.
COVERAGE_MARGIN = 1e-4

# Rows of the map a program makes: the audited rows of all heads of one KV head, 16 at a time.
MAP_ROWS = 16
MAP_KEYS = 64
MAP_WARPS = 4
NUM_WARPS = 8


@dataclass(frozen=True, slots=True)
class Audit:
    """What the audit rows say.

    Attributes:
        levels: Of the lines.
        coverage: [B, Hq, audit_rows, 8] fp32: exact mass kept of each audit row by all blocks and
            at each multiple; -1 for a row that does not count, NaN for one of unknown masses.
    """

    levels: Levels
    coverage: Tensor


def audit(
    mean_query: Tensor, keys: SplitKeys, measured: Masses, layout: Layout, *, scale: float
) -> Audit:
    """Line levels and the coverage of each multiple of the floor.

    Args:
        mean_query: [B, Hq, Nq, D] fp32, contiguous.
        keys: The pooled keys.
        measured: Masses of the audited blocks and the proxy rows.
        layout: Of this call.
        scale: Factor on the logits.
    """
    x = layout
    audit_rows = measured.mass.shape[2] - x.planes
    found = levels(measured, layout)
    coverage = mean_query.new_empty((x.B, x.Hq, audit_rows, 8))
    logits = mean_query.new_empty((x.B, x.Hq, audit_rows, x.Nkv))
    rows = triton.cdiv(x.G * audit_rows, MAP_ROWS)
    _map_kernel[(triton.cdiv(x.Nkv, MAP_KEYS), rows, x.B * x.Hkv)](
        mean_query,
        keys.parts,
        keys.scale,
        logits,
        x.first_valid,
        x.bounds,
        x.q_offset,
        x.Hkv,
        x.G,
        x.Lq,
        x.Lkv,
        scale * LOG2_E.value,
        D=x.D,
        BLOCK_D=x.BLOCK_D,
        BLOCK_Q=x.block_q,
        BLOCK_KV=x.block_kv,
        AUDITS=audit_rows,
        ROWS=MAP_ROWS,
        BLOCK_J=MAP_KEYS,
        num_warps=MAP_WARPS,
    )
    _coverage_kernel[(audit_rows, x.B * x.Hq)](
        logits,
        measured.mass,
        found.verticals,
        found.slashes,
        coverage,
        x.first_valid,
        x.bounds,
        x.q_offset,
        x.Hq,
        x.Lq,
        x.Lkv,
        BLOCK_Q=x.block_q,
        BLOCK_KV=x.block_kv,
        AUDITS=audit_rows,
        PLANES=x.planes,
        PHASES=x.phases,
        MULTIPLES=MULTIPLES,
        CHUNK=min(1024, triton.next_power_of_2(x.Nkv)),
        num_warps=NUM_WARPS,
    )
    return Audit(found, coverage)


@triton.jit(do_not_specialize=["Hkv", "G", "Lq", "Lkv"])
def _map_kernel(
    mean_q_ptr,
    parts_ptr,
    scale_ptr,
    logits_ptr,
    first_valid_ptr,
    bounds_ptr,
    offset_ptr,
    Hkv,
    G,
    Lq,
    Lkv,
    exponent,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    AUDITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    """Grid (key tiles, row tiles, B * Hkv): log2 weights of audited rows, -inf if not visible."""
    kv_head = tl.program_id(2).to(tl.int64)  # before the first multiply
    b = kv_head // Hkv
    Nq, Nkv = tl.cdiv(Lq, BLOCK_Q), tl.cdiv(Lkv, BLOCK_KV)
    offset, reach = query_span(offset_ptr, Lq, Lkv)
    start, end = bounds_of(bounds_ptr, b, reach)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    there = m < G * AUDITS
    h = kv_head * G + m // AUDITS
    row = audit_block(start, end, offset, Nq, m % AUDITS, AUDITS, BLOCK_Q)
    _, q_last = row_ends(row, offset, reach, BLOCK_Q)
    blk = tl.program_id(0) * BLOCK_J + tl.arange(0, BLOCK_J)
    keys = first_keys(first_valid_ptr, b, blk, Nkv, BLOCK_KV)
    hi, lo, row_scale = load_rows(mean_q_ptr, h * Nq + row, there, D, BLOCK_D)
    low_stride = tl.cast(tl.num_programs(2), tl.int64) * Nkv * D
    logits = pooled_logits(
        hi, lo, row_scale * exponent, parts_ptr + kv_head * Nkv * D, low_stride,
        scale_ptr + kv_head * Nkv, blk, Nkv, D, BLOCK_D,
    )  # fmt: skip
    logits = tl.where(keys[None, :] <= q_last[:, None], logits, float("-inf"))
    out_ptrs = logits_ptr + (h * AUDITS + m % AUDITS)[:, None] * Nkv + blk[None, :]
    tl.store(out_ptrs, logits, mask=there[:, None] & (blk < Nkv)[None, :])


@triton.jit(do_not_specialize=["Hq", "Lq", "Lkv"])
def _coverage_kernel(
    logits_ptr,
    mass_ptr,
    verticals_ptr,
    slashes_ptr,
    coverage_ptr,
    first_valid_ptr,
    bounds_ptr,
    offset_ptr,
    Hq,
    Lq,
    Lkv,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    AUDITS: tl.constexpr,
    PLANES: tl.constexpr,
    PHASES: tl.constexpr,
    MULTIPLES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (audit rows, B * Hq)."""
    step = tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)  # before the first multiply
    b = bh // Hq
    Nq, Nkv = tl.cdiv(Lq, BLOCK_Q), tl.cdiv(Lkv, BLOCK_KV)
    offset, reach = query_span(offset_ptr, Lq, Lkv)
    start, end = bounds_of(bounds_ptr, b, reach)
    row = audit_block(start, end, offset, Nq, step, AUDITS, BLOCK_Q)
    q_first, q_last = row_ends(row, offset, reach, BLOCK_Q)
    limit = q_last // BLOCK_KV + 1
    logits_ptr += (bh * AUDITS + step) * Nkv
    mass_ptr += (bh * (AUDITS + PLANES) + step) * Nkv

    best = tl.full([CHUNK], float("-inf"), tl.float32)
    last = tl.full([CHUNK], -1, tl.int32)
    seen = tl.zeros([CHUNK], tl.int32)
    for j in range(0, limit, CHUNK):
        blk = j + tl.arange(0, CHUNK)
        visible = first_keys(first_valid_ptr, b, blk, Nkv, BLOCK_KV) <= q_last
        logits = tl.load(logits_ptr + blk, mask=blk < Nkv, other=float("-inf"))
        best = tl.maximum(best, logits)
        last = tl.maximum(last, tl.where(visible, blk, -1))
        seen += visible.to(tl.int32)
    top = tl.max(best, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    first_block = block_of_start(start, Nkv, BLOCK_KV)
    last_block, count = tl.max(last, 0), tl.sum(seen, 0)
    sums = tl.zeros([CHUNK], tl.float32)
    rests = tl.zeros([CHUNK], tl.float32)
    for j in range(0, limit, CHUNK):
        blk = j + tl.arange(0, CHUNK)
        logits = tl.load(logits_ptr + blk, mask=blk < Nkv, other=float("-inf"))
        weights = tl.exp2(logits - top)
        sums += weights
        rests += tl.where((blk == first_block) | (blk == last_block), 0.0, weights)
    floor = row_threshold(tl.sum(rests, 0), tl.sum(sums, 0), count)

    # coverage: exact mass of the blocks whose level is above 0 (visible), 1, ... 7
    hi = (q_first + (BLOCK_Q - 1)) // BLOCK_KV
    verticals_ptr += bh * Nkv
    slashes_ptr += (bh * PHASES + row % PHASES) * (Nkv + 2)
    thresholds = tl.arange(0, 8)
    covered = tl.zeros([8], tl.float32)
    for j in range(0, limit, CHUNK):
        blk = j + tl.arange(0, CHUNK)
        visible = first_keys(first_valid_ptr, b, blk, Nkv, BLOCK_KV) <= q_last
        logits = tl.load(logits_ptr + blk, mask=blk < Nkv, other=float("-inf"))
        level = value_level(tl.exp2(logits - top), floor, MULTIPLES)
        v_level = tl.load(verticals_ptr + blk, mask=visible, other=0).to(tl.int32)
        s_level = tl.load(slashes_ptr + (hi - blk), mask=visible, other=0).to(tl.int32)
        level = tl.maximum(level, tl.maximum(v_level, s_level))
        always = (blk == first_block) | (blk == last_block)
        level = tl.where(visible, tl.where(always, 7, level) + 1, 0)
        mass = tl.load(mass_ptr + blk, mask=visible, other=0.0)
        kept = level[:, None] > thresholds[None, :]  # [CHUNK, 8]
        covered += tl.sum(tl.where(kept, mass[:, None], 0.0), 0)
    before = audit_block(start, end, offset, Nq, step - 1, AUDITS, BLOCK_Q)
    distinct = (end > tl.maximum(start, offset)) & ((step == 0) | (row != before))
    covered = tl.where(distinct, covered, -1.0)
    tl.store(coverage_ptr + (bh * AUDITS + step) * 8 + thresholds, covered)
