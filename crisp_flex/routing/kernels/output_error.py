"""Stage `output_error` of policy "bounded" on the GPU: sampled rows under every candidate at once.

Oracle: routing.output_error and the audit of policies.bounded. Attention's forward pass with a row
for each candidate of each sampled query row: the rows of a query differ in which blocks they skip.
Bound by tl.dot, like the forward of that many rows.
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
    kv_head_of,
    query_span,
    row_ends,
)
from crisp_flex.routing.kernels.tile import LOG2_E, _dots, log2_sum
from crisp_flex.routing.output_error import SAMPLED_ROWS
from crisp_flex.routing.policies.bounded import LEFT_OUT

# One more than the candidates, for all blocks; a power of two.
SLOTS = len(LEFT_OUT) + 1
TILE_ROWS = SLOTS * SAMPLED_ROWS
# Programs to aim at, some waves of any GPU; fixed, so that all GPUs add up in the same order.
_PROGRAMS = 512
_LEAST_SPLIT = 8


@dataclass(frozen=True, slots=True)
class Choice:
    """What the audit chose per head.

    Attributes:
        share: [B, Hq] fp32: left-out share, -1 for all blocks.
        coverage: [B, Hq] fp32: exact mass kept on the sampled rows with it.
    """

    share: Tensor
    coverage: Tensor


def choose_share(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sums: Tensor,
    layout: Layout,
    *,
    scale: float,
    audit_rows: int,
    max_error: float,
) -> Choice:
    """The largest left-out share of each head whose output error is within max_error.

    Args:
        query: [B, Hq, Lq, D], any strides.
        key: [B, Hkv, Lkv, D], any strides.
        value: [B, Hkv, Lkv, Dv], any strides, the dtype of query.
        sums: Of the stage `estimate`.
        layout: Of this call.
        scale: Factor on the logits.
        audit_rows: Audited query blocks.
        max_error: Relative to the root mean square of the heads' outputs.
    """
    x = layout
    Dv = value.shape[3]
    BLOCK_DV = max(int(triton.next_power_of_2(Dv)), 16)
    heads = x.B * x.Hq
    splits = min(triton.cdiv(_PROGRAMS, heads * audit_rows), triton.cdiv(x.Nkv, _LEAST_SPLIT))
    split_blocks = triton.cdiv(x.Nkv, splits)

    def empty(*shape: int) -> Tensor:
        return sums.new_empty((x.B, x.Hq, *shape))

    levels = empty(audit_rows, SLOTS)
    outputs = empty(audit_rows, splits, TILE_ROWS, Dv)
    log2_sums = empty(audit_rows, splits, TILE_ROWS)
    numbers = (x.Hq, x.Hkv, x.Lq, x.Lkv)
    sizes = {"BLOCK_Q": x.block_q, "BLOCK_KV": x.block_kv}
    _levels_kernel[(SLOTS, audit_rows, heads)](
        sums,
        levels,
        x.first_valid,
        x.bounds,
        x.q_offset,
        *numbers,
        audit_rows,
        LEFT_OUT=LEFT_OUT,
        N=triton.next_power_of_2(x.Nkv),
        **sizes,
    )
    _rows_kernel[(audit_rows, splits, heads)](
        query,
        key,
        value,
        sums,
        levels,
        outputs,
        log2_sums,
        x.key_valid,
        x.first_valid,
        x.bounds,
        x.q_offset,
        *query.stride(),
        *key.stride(),
        *value.stride(),
        *numbers,
        audit_rows,
        split_blocks,
        scale * LOG2_E.value,
        D=x.D,
        BLOCK_D=x.BLOCK_D,
        DV=Dv,
        BLOCK_DV=BLOCK_DV,
        ROWS=SAMPLED_ROWS,
        SLOTS=SLOTS,
        NUM_STAGES=2 if max(x.BLOCK_D, BLOCK_DV) <= 128 else 1,
        num_warps=8,
        **sizes,
    )
    errors, masses = empty(audit_rows, SLOTS), empty(audit_rows, SLOTS)
    norms = empty(audit_rows, 2)
    _error_kernel[(SLOTS, audit_rows, heads)](
        outputs,
        log2_sums,
        errors,
        masses,
        norms,
        x.bounds,
        x.q_offset,
        *numbers,
        audit_rows,
        splits,
        DV=Dv,
        BLOCK_DV=BLOCK_DV,
        ROWS=SAMPLED_ROWS,
        SLOTS=SLOTS,
        BLOCK_Q=x.block_q,
    )
    chosen = Choice(empty(), empty())
    _choose_kernel[(heads,)](
        errors,
        masses,
        norms,
        chosen.share,
        chosen.coverage,
        x.Hq,
        audit_rows,
        max_error * max_error,
        LEFT_OUT=LEFT_OUT,
        SLOTS=SLOTS,
        CHUNK=128,
        num_warps=1,
    )
    return chosen


@triton.jit
def _sampled_rows(
    start, end, offset, Nq, step, count, BLOCK_Q: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Query block of audit step, positions [ROWS] of its sampled rows, and which of them count."""
    block = audit_block(start, end, offset, Nq, step, count, BLOCK_Q)
    before = audit_block(start, end, offset, Nq, step - 1, count, BLOCK_Q)
    distinct = (end > tl.maximum(start, offset)) & ((step == 0) | (block != before))
    first = block * BLOCK_Q + offset
    last = tl.minimum(first + (BLOCK_Q - 1), end - 1)
    every: tl.constexpr = BLOCK_Q // ROWS if BLOCK_Q > ROWS else 1
    position = last - tl.arange(0, ROWS) * every
    return block, position, distinct & (position >= tl.maximum(first, start))


@triton.jit(do_not_specialize=["Hq", "Hkv", "Lq", "Lkv", "audits"])
def _levels_kernel(
    sums_ptr,
    levels_ptr,
    first_valid_ptr,
    bounds_ptr,
    offset_ptr,
    Hq,
    Hkv,
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


@triton.jit(do_not_specialize=["Hq", "Hkv", "Lq", "Lkv", "audits", "split_blocks"])
def _rows_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    sums_ptr,
    levels_ptr,
    out_ptr,
    log2_ptr,
    key_valid_ptr,
    first_valid_ptr,
    bounds_ptr,
    offset_ptr,
    stride_qb,
    stride_qh,
    stride_ql,
    stride_qd,
    stride_kb,
    stride_kh,
    stride_kl,
    stride_kd,
    stride_vb,
    stride_vh,
    stride_vl,
    stride_vd,
    Hq,
    Hkv,
    Lq,
    Lkv,
    audits,
    split_blocks,
    exponent,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """Grid (audited blocks, splits, B * Hq): SLOTS * ROWS rows over a split of the keys."""
    step = tl.program_id(0)
    split = tl.program_id(1)
    bh = tl.program_id(2).to(tl.int64)  # before the first multiply
    b, kv_head = kv_head_of(bh, Hq, Hkv)
    Nq, Nkv = tl.cdiv(Lq, BLOCK_Q), tl.cdiv(Lkv, BLOCK_KV)
    offset, reach = query_span(offset_ptr, Lq, Lkv)
    start, end = bounds_of(bounds_ptr, b, reach)
    row, at, counts = _sampled_rows(start, end, offset, Nq, step, audits, BLOCK_Q, ROWS)
    q_first, q_last = row_ends(row, offset, reach, BLOCK_Q)
    first_block = block_of_start(start, Nkv, BLOCK_KV)
    last_seen = tl.max(tl.where(counts, at, -1), 0)  # the last block that anything sees, -1: none

    # slot-major rows; a row that does not count takes part and is left out of the sums
    m = tl.arange(0, SLOTS * ROWS)
    every: tl.constexpr = BLOCK_Q // ROWS if BLOCK_Q > ROWS else 1
    position = tl.minimum(q_first + (BLOCK_Q - 1), end - 1) - (m % ROWS) * every
    token = tl.minimum(tl.maximum(position - offset, 0), Lq - 1).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    n = tl.arange(0, BLOCK_KV)
    q_ptr += b * stride_qb + (bh % Hq) * stride_qh
    q_ptrs = q_ptr + token[:, None] * stride_ql + d[None, :] * stride_qd
    q = tl.load(q_ptrs, mask=(d < D)[None, :], other=0.0)
    level = tl.load(levels_ptr + (bh * audits + step) * SLOTS + m // ROWS)
    k_ptr += b * stride_kb + (kv_head % Hkv) * stride_kh
    v_ptr += b * stride_vb + (kv_head % Hkv) * stride_vh
    if key_valid_ptr is not None:
        key_valid_ptr += b * Lkv
    sums_ptr += (bh * Nq + row) * Nkv

    top = tl.full([SLOTS * ROWS], float("-inf"), tl.float32)
    total = tl.zeros([SLOTS * ROWS], tl.float32)
    acc = tl.zeros([SLOTS * ROWS, BLOCK_DV], tl.float32)
    j_first = split * split_blocks
    j_last = tl.minimum(
        j_first + split_blocks, tl.where(last_seen < 0, 0, last_seen // BLOCK_KV + 1)
    )
    last_block = tl.full([], -1, tl.int32) + q_last // BLOCK_KV + 1
    if first_valid_ptr is not None:
        # the last block with a key that the row block sees, as in the list of the row
        last_block = tl.full([], -1, tl.int32)
        for j in range(0, q_last // BLOCK_KV + 1, 128):
            blk = j + tl.arange(0, 128)
            seen = first_keys(first_valid_ptr, b, blk, Nkv, BLOCK_KV) <= q_last
            last_block = tl.maximum(last_block, tl.max(tl.where(seen, blk, -1), 0))
    for blk in tl.range(j_first, j_last, num_stages=NUM_STAGES):
        dots = _dots(
            q, k_ptr, key_valid_ptr, stride_kl, stride_kd, position, blk, Lkv,
            D, BLOCK_D, BLOCK_KV, True,
        )  # fmt: skip
        kept = ~(tl.load(sums_ptr + blk) <= level)
        kept = kept | always_kept(blk, q_first, q_last, first_block, last_block, BLOCK_Q, BLOCK_KV)
        logits = tl.where(kept[:, None], dots * exponent, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(logits - base[:, None])
        old = tl.exp2(top - base)
        there = blk * BLOCK_KV + n < Lkv
        if key_valid_ptr is not None:
            # what stands in padding may be NaN
            token_valid = tl.load(key_valid_ptr + blk * BLOCK_KV + n, mask=there, other=0)
            there = there & (token_valid != 0)
        v_ptrs = v_ptr + tl.cast(blk, tl.int64) * BLOCK_KV * stride_vl
        v_ptrs = v_ptrs + (n[:, None] * stride_vl + dv[None, :] * stride_vd)
        v = tl.load(v_ptrs, mask=there[:, None] & (dv < DV)[None, :], other=0.0)
        total = total * old + tl.sum(weights, 1)
        acc = acc * old[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc)
        top = new_top
    piece = (bh * audits + step) * tl.num_programs(1) + split
    tl.store(log2_ptr + piece * (SLOTS * ROWS) + m, log2_sum(top, total))
    out_ptrs = out_ptr + (piece * (SLOTS * ROWS) + m)[:, None] * DV + dv[None, :]
    # 0 / 0 of a split that a row skips as a whole: its weight is 0
    safe = tl.where(total == 0, 1.0, total)
    tl.store(out_ptrs, acc / safe[:, None], mask=(dv < DV)[None, :])


@triton.jit(do_not_specialize=["Hq", "Hkv", "Lq", "Lkv", "audits", "splits"])
def _error_kernel(
    out_ptr,
    log2_ptr,
    error_ptr,
    mass_ptr,
    norm_ptr,
    bounds_ptr,
    offset_ptr,
    Hq,
    Hkv,
    Lq,
    Lkv,
    audits,
    splits,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """Grid (slots, audited blocks, B * Hq): squared error and kept mass, summed over rows."""
    slot = tl.program_id(0)
    step = tl.program_id(1)
    bh = tl.program_id(2).to(tl.int64)  # before the first multiply
    Nq = tl.cdiv(Lq, BLOCK_Q)
    offset, reach = query_span(offset_ptr, Lq, Lkv)
    start, end = bounds_of(bounds_ptr, bh // Hq, reach)
    _, _, counts = _sampled_rows(start, end, offset, Nq, step, audits, BLOCK_Q, ROWS)
    piece = bh * audits + step
    got, got_log2 = _merged(out_ptr, log2_ptr, piece, slot, splits, DV, BLOCK_DV, ROWS, SLOTS)
    want, want_log2 = _merged(
        out_ptr, log2_ptr, piece, SLOTS - 1, splits, DV, BLOCK_DV, ROWS, SLOTS
    )
    off = got - want
    error = tl.sum(tl.where(counts, tl.sum(off * off, 1), 0.0), 0)
    mass = tl.sum(tl.where(counts, tl.exp2(got_log2 - want_log2), 0.0), 0)
    tl.store(error_ptr + piece * SLOTS + slot, error)
    tl.store(mass_ptr + piece * SLOTS + slot, mass)
    if slot == SLOTS - 1:
        norm = tl.sum(tl.where(counts, tl.sum(want * want, 1), 0.0), 0)
        tl.store(norm_ptr + piece * 2, norm)
        tl.store(norm_ptr + piece * 2 + 1, tl.sum(counts.to(tl.float32), 0))


@triton.jit
def _merged(
    out_ptr, log2_ptr, piece, slot, splits, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Outputs [ROWS, BLOCK_DV] of a slot over all splits, and log2 of their sums [ROWS]."""
    r = tl.arange(0, ROWS)
    dv = tl.arange(0, BLOCK_DV)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    for split in range(splits):
        row = (piece * splits + split) * (SLOTS * ROWS) + slot * ROWS + r
        log2 = tl.load(log2_ptr + row)
        out = tl.load(out_ptr + row[:, None] * DV + dv[None, :], mask=(dv < DV)[None, :], other=0.0)
        new_top = tl.maximum(top, log2, propagate_nan=tl.PropagateNan.ALL)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        old, weight = tl.exp2(top - base), tl.exp2(log2 - base)
        total = total * old + weight
        acc = acc * old[:, None] + out * weight[:, None]
        top = new_top
    base = tl.where(top == float("-inf"), 0.0, top)
    return acc / total[:, None], base + tl.log2(total)


@triton.jit(do_not_specialize=["Hq", "audits"])
def _choose_kernel(
    error_ptr,
    mass_ptr,
    norm_ptr,
    share_ptr,
    coverage_ptr,
    Hq,
    audits,
    squared_bound,
    LEFT_OUT: tl.constexpr,
    SLOTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (B * Hq,): the first candidate whose error is within the bound."""
    bh = tl.program_id(0).to(tl.int64)  # before the first multiply
    slot = tl.arange(0, SLOTS)
    error = tl.zeros([SLOTS], tl.float32)
    mass = tl.zeros([SLOTS], tl.float32)
    rows = tl.full([], 0.0, tl.float32)
    for step in range(audits):
        piece = bh * audits + step
        error += tl.load(error_ptr + piece * SLOTS + slot)
        mass += tl.load(mass_ptr + piece * SLOTS + slot)
        rows += tl.load(norm_ptr + piece * 2 + 1)
    norms = tl.zeros([CHUNK], tl.float32)
    layer = (bh // Hq) * Hq * audits
    for i in range(0, Hq * audits, CHUNK):
        at = i + tl.arange(0, CHUNK)
        norms += tl.load(norm_ptr + (layer + at) * 2, mask=at < Hq * audits, other=0.0)
    bound = tl.sum(norms, 0) / Hq * squared_bound
    # no error is within a bound of Inf or NaN, and none of NaN within any
    bound = tl.where(bound < float("inf"), bound, -1.0)
    fits = (error <= bound) & (slot < SLOTS - 1)
    chosen = tl.min(tl.where(fits, slot, SLOTS - 1), 0)
    reached = tl.sum(tl.where(slot == chosen, mass, 0.0), 0) / tl.maximum(rows, 1.0)
    whole = (chosen == SLOTS - 1) | (rows == 0)
    tl.store(share_ptr + bh, left_out(chosen, LEFT_OUT))
    tl.store(coverage_ptr + bh, tl.where(whole, 1.0, reached))
