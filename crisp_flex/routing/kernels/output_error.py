"""Stage `output_error` of policy "bounded" on the GPU, second half: the errors of all candidates.

Oracle: routing.output_error. Bound by latency, and at long
lengths by reading the sampled rows' block outputs once.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from crisp_flex.routing.kernels.layout import Layout
from crisp_flex.routing.kernels.left_out import always_kept, left_out, level_of, row_masses
from crisp_flex.routing.kernels.positions import (
    audit_block,
    block_of_start,
    bounds_of,
    first_keys,
    query_span,
    row_ends,
)
from crisp_flex.routing.kernels.sampled_rows import RowBlocks, sampled_rows
from crisp_flex.routing.output_error import SAMPLED_ROWS
from crisp_flex.routing.policies.bounded import LEFT_OUT

# One more than the candidates, for all blocks; a power of two.
SLOTS = len(LEFT_OUT) + 1
# Key blocks at once.
BLOCK_J = 64


@dataclass(frozen=True, slots=True)
class Errors:
    """What the sampled rows say of each candidate, and in the last slot of all blocks, fp32.

    Attributes:
        error: [B, Hq, audit_rows, SAMPLED_ROWS, SLOTS]: squared error of the output; 0 for a row
            that does not count.
        mass: The same shape: exact mass kept; 0 for a row that does not count.
        facts: [B, Hq, audit_rows, SAMPLED_ROWS, 4]: squared norm of the exact output; whether the
            row counts; its c_struct in the last audited block, else 0; whether it is a valid query.
    """

    error: Tensor
    mass: Tensor
    facts: Tensor


def output_error(rows: RowBlocks, sums: Tensor, layout: Layout) -> Errors:
    """The output errors of all candidates on the sampled rows.

    Args:
        rows: Of row_blocks.
        sums: Of the stage `estimate`.
        layout: Of this call.
    """
    x = layout
    audit_rows, Dv = rows.output.shape[2], rows.output.shape[5]
    heads = x.B * x.Hq

    def empty(*shape: int) -> Tensor:
        return sums.new_empty((x.B, x.Hq, audit_rows, *shape))

    levels = empty(SLOTS)
    errors = Errors(
        error=empty(SAMPLED_ROWS, SLOTS),
        mass=empty(SAMPLED_ROWS, SLOTS),
        facts=empty(SAMPLED_ROWS, 4),
    )
    sizes = {"BLOCK_Q": x.block_q, "BLOCK_KV": x.block_kv}
    _levels_kernel[(SLOTS, audit_rows, heads)](
        sums,
        levels,
        x.first_valid,
        x.bounds,
        x.q_offset,
        x.Hq,
        x.Lq,
        x.Lkv,
        audit_rows,
        LEFT_OUT=LEFT_OUT,
        N=int(triton.next_power_of_2(x.Nkv)),
        **sizes,
    )
    _error_kernel[(SAMPLED_ROWS, audit_rows, heads)](
        rows.output,
        rows.log2_sum,
        rows.structure,
        sums,
        levels,
        errors.error,
        errors.mass,
        errors.facts,
        x.first_valid,
        x.bounds,
        x.q_offset,
        x.Hq,
        x.Lq,
        x.Lkv,
        audit_rows,
        rows.structure.shape[2],
        rows.split_blocks,
        DV=Dv,
        BLOCK_DV=max(int(triton.next_power_of_2(Dv)), 16),
        ROWS=SAMPLED_ROWS,
        SLOTS=SLOTS,
        BLOCK_J=BLOCK_J,
        **sizes,
    )
    return errors


@triton.jit(do_not_specialize=["Hq", "Lq", "Lkv", "audits"])
def _levels_kernel(
    sums_ptr,
    levels_ptr,
    first_valid_ptr,
    bounds_ptr,
    offset_ptr,
    Hq,
    Lq,
    Lkv,
    audits,
    LEFT_OUT: tl.constexpr,
    N: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """Grid (slots, audited blocks, B * Hq): the level of a candidate, in the unit of the sums."""
    slot = tl.program_id(0)
    step = tl.program_id(1)
    bh = tl.program_id(2).to(tl.int64)  # before the first multiply
    b = bh // Hq
    Nq, Nkv = tl.cdiv(Lq, BLOCK_Q), tl.cdiv(Lkv, BLOCK_KV)
    offset, reach = query_span(offset_ptr, Lq, Lkv)
    start, end = bounds_of(bounds_ptr, b, reach)
    row = audit_block(start, end, offset, Nq, step, audits, BLOCK_Q)
    _, q_last = row_ends(row, offset, reach, BLOCK_Q)
    _, _, logs, log2_total = row_masses(
        sums_ptr, first_valid_ptr, b, (bh * Nq + row) * Nkv, q_last, Nkv, BLOCK_KV, N
    )
    level = level_of(logs, left_out(slot, LEFT_OUT)) + log2_total
    tl.store(levels_ptr + (bh * audits + step) * tl.num_programs(0) + slot, level)


@triton.jit(do_not_specialize=["Hq", "Lq", "Lkv", "audits", "splits", "split_blocks"])
def _error_kernel(
    out_ptr,
    log2_ptr,
    structure_ptr,
    sums_ptr,
    levels_ptr,
    error_ptr,
    mass_ptr,
    facts_ptr,
    first_valid_ptr,
    bounds_ptr,
    offset_ptr,
    Hq,
    Lq,
    Lkv,
    audits,
    splits,
    split_blocks,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """Grid (sampled rows, audited blocks, B * Hq): error and mass of a row under each candidate."""
    r = tl.program_id(0)
    step = tl.program_id(1)
    bh = tl.program_id(2).to(tl.int64)  # before the first multiply
    b = bh // Hq
    Nq, Nkv = tl.cdiv(Lq, BLOCK_Q), tl.cdiv(Lkv, BLOCK_KV)
    offset, reach = query_span(offset_ptr, Lq, Lkv)
    start, end = bounds_of(bounds_ptr, b, reach)
    row, position, valid = sampled_rows(start, end, offset, Nq, step, r, audits, BLOCK_Q, ROWS)
    before = audit_block(start, end, offset, Nq, step - 1, audits, BLOCK_Q)
    distinct = (step == 0) | (row != before)
    seen = tl.where(valid, position // BLOCK_KV + 1, 0)
    piece = (bh * audits + step) * ROWS + r
    out_ptr += (bh * audits + step) * Nkv * ROWS * DV
    log2_ptr += (bh * audits + step) * Nkv * ROWS
    sums_ptr += (bh * Nq + row) * Nkv

    # the row's whole sum, and the last block that its query block sees
    q_first, q_last = row_ends(row, offset, reach, BLOCK_Q)
    best = tl.full([BLOCK_J], float("-inf"), tl.float32)
    last_block = tl.full([BLOCK_J], -1, tl.int32)
    for j in range(0, q_last // BLOCK_KV + 1, BLOCK_J):
        blk = j + tl.arange(0, BLOCK_J)
        log2 = tl.load(log2_ptr + blk * ROWS + r, mask=blk < seen, other=float("-inf"))
        best = tl.maximum(best, log2)
        visible = first_keys(first_valid_ptr, b, blk, Nkv, BLOCK_KV) <= q_last
        last_block = tl.maximum(last_block, tl.where(visible, blk, -1))
    top = tl.max(best, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    last_block = tl.max(last_block, 0)
    first_block = block_of_start(start, Nkv, BLOCK_KV)

    slot = tl.arange(0, SLOTS)
    dv = tl.arange(0, BLOCK_DV)
    level = tl.load(levels_ptr + (bh * audits + step) * SLOTS + slot)
    acc = tl.zeros([SLOTS, BLOCK_DV], tl.float32)
    total = tl.zeros([SLOTS], tl.float32)
    whole_row = tl.zeros([BLOCK_J], tl.float32)
    for j in range(0, seen, BLOCK_J):
        blk = j + tl.arange(0, BLOCK_J)
        there = blk < seen
        log2 = tl.load(log2_ptr + blk * ROWS + r, mask=there, other=float("-inf"))
        sums = tl.load(sums_ptr + blk, mask=there, other=float("-inf"))
        out_ptrs = out_ptr + (blk * ROWS + r)[:, None] * DV + dv[None, :]
        out = tl.load(out_ptrs, mask=there[:, None] & (dv < DV)[None, :], other=0.0)
        always = always_kept(blk, q_first, q_last, first_block, last_block, BLOCK_Q, BLOCK_KV)
        kept = ~(sums[None, :] <= level[:, None]) | always[None, :]
        # rounded for the dot, and so for the sum: what is left out is what the candidates differ by
        mass = tl.exp2(log2 - base)
        whole_row += mass
        weights = mass.to(out.dtype)
        weights = tl.where(kept & there[None, :], weights[None, :], 0.0)
        total += tl.sum(weights.to(tl.float32), 1)
        acc = tl.dot(weights.to(out.dtype), out, acc, input_precision="ieee")
    mean = acc / total[:, None]
    exact = tl.sum(tl.where((slot == SLOTS - 1)[:, None], mean, 0.0), 0)
    whole = tl.sum(tl.where(slot == SLOTS - 1, total, 0.0), 0)
    off = tl.where((dv < DV)[None, :], mean - exact[None, :], 0.0)
    counts = valid & distinct
    tl.store(error_ptr + piece * SLOTS + slot, tl.where(counts, tl.sum(off * off, 1), 0.0))
    tl.store(mass_ptr + piece * SLOTS + slot, tl.where(counts, total / whole, 0.0))
    norm = tl.sum(tl.where(dv < DV, exact * exact, 0.0), 0)
    tl.store(facts_ptr + piece * 4, tl.where(counts, norm, 0.0))
    tl.store(facts_ptr + piece * 4 + 1, counts.to(tl.float32))
    structure = tl.full([], 0.0, tl.float32)
    if step == audits - 1:
        for split in range(splits):
            log2 = tl.load(
                structure_ptr + (bh * splits + split) * ROWS + r,
                mask=split * split_blocks < seen,
                other=float("-inf"),
            )
            structure += tl.exp2(log2 - base)
    tl.store(facts_ptr + piece * 4 + 2, tl.where(valid, structure / tl.sum(whole_row, 0), 0.0))
    tl.store(facts_ptr + piece * 4 + 3, valid.to(tl.float32))
