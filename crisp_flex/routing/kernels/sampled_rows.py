"""Stage `output_error` of policy "bounded" on the GPU, first half: sampled rows, block by block.

Oracle: routing.output_error. For each sampled row and key block the attention output over that
block alone and the log2 of its sum of exponentials: whatever blocks a candidate keeps, its output
is their weighted mean. All sampled rows of a KV head share the keys and values that a program
reads, so the stage is bound by bytes: K and V once, and 1 / block_kv of a map of vectors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from crisp_flex.routing.kernels.layout import Layout
from crisp_flex.routing.kernels.positions import audit_block, bounds_of, query_span
from crisp_flex.routing.kernels.tile import LOG2_E, exponentials, key_dots, log2_sum, structure_sum
from crisp_flex.routing.output_error import SAMPLED_ROWS

# One stage: 64 KiB of shared memory at D 128, which GPUs with 99 KiB for a program take, too.
TILE_ROWS, NUM_WARPS = 128, 8
# Beyond a head dim of 128 more rows spill their registers.
WIDE_TILE_ROWS, WIDE_NUM_WARPS = 32, 4
NUM_STAGES = 1
# Key blocks per program: enough to pay for loading the rows, few enough for a wave of programs.
LEAST_SPLIT, MOST_SPLIT = 2, 16


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """What each sampled row has of each key block; undefined where it sees none of its keys.

    Attributes:
        output: [B, Hq, audit_rows, Nkv, SAMPLED_ROWS, Dv] in the dtype of value: attention over the
            block alone.
        log2_sum: [B, Hq, audit_rows, Nkv, SAMPLED_ROWS] fp32.
        structure: [B, Hq, splits, SAMPLED_ROWS] fp32: log2_sum of the first and the last 128 keys,
            for the rows of the last audited block.
        split_blocks: Key blocks of a split.
    """

    output: Tensor
    log2_sum: Tensor
    structure: Tensor
    split_blocks: int


def row_blocks(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, *, scale: float, audit_rows: int
) -> RowBlocks:
    """Attention of the sampled rows of each audited query block over each key block by itself.

    Args:
        query: [B, Hq, Lq, D], any strides.
        key: [B, Hkv, Lkv, D], any strides.
        value: [B, Hkv, Lkv, Dv], any strides.
        layout: Of this call.
        scale: Factor on the logits.
        audit_rows: Audited query blocks.
    """
    x = layout
    Dv = value.shape[3]
    BLOCK_DV = max(int(triton.next_power_of_2(Dv)), 16)
    split_blocks = min(max(x.Nkv // 16, LEAST_SPLIT), MOST_SPLIT)
    splits = triton.cdiv(x.Nkv, split_blocks)
    shape = (x.B, x.Hq, audit_rows, x.Nkv, SAMPLED_ROWS)
    out = RowBlocks(
        output=value.new_empty((*shape, Dv)),
        log2_sum=value.new_empty(shape, dtype=torch.float32),
        structure=value.new_empty((x.B, x.Hq, splits, SAMPLED_ROWS), dtype=torch.float32),
        split_blocks=split_blocks,
    )
    rows = x.G * audit_rows * SAMPLED_ROWS
    wide = max(x.BLOCK_D, BLOCK_DV) > 128
    tile = min(max(int(triton.next_power_of_2(rows)), 16), WIDE_TILE_ROWS if wide else TILE_ROWS)
    _row_blocks_kernel[(triton.cdiv(rows, tile), splits, x.B * x.Hkv)](
        query,
        key,
        value,
        out.output,
        out.log2_sum,
        out.structure,
        x.key_valid,
        x.bounds,
        x.q_offset,
        *query.stride(),
        *key.stride(),
        *value.stride(),
        x.Hkv,
        x.G,
        x.Lq,
        x.Lkv,
        audit_rows,
        split_blocks,
        scale * LOG2_E.value,
        D=x.D,
        BLOCK_D=x.BLOCK_D,
        DV=Dv,
        BLOCK_DV=BLOCK_DV,
        BLOCK_Q=x.block_q,
        BLOCK_KV=x.block_kv,
        ROWS=SAMPLED_ROWS,
        TILE=tile,
        NUM_STAGES=NUM_STAGES,
        num_warps=WIDE_NUM_WARPS if wide or tile < 64 else NUM_WARPS,
    )
    return out


@triton.jit
def sampled_rows(start, end, offset, Nq, step, r, count, BLOCK_Q: tl.constexpr, ROWS: tl.constexpr):
    """Query block of audit step, position of its sampled row r, and whether that is a valid query.

    step and r may be tensors of one shape. r counts backwards from the last valid row.
    """
    block = audit_block(start, end, offset, Nq, step, count, BLOCK_Q)
    first = block * BLOCK_Q + offset
    every: tl.constexpr = BLOCK_Q // ROWS if BLOCK_Q > ROWS else 1
    position = tl.minimum(first + (BLOCK_Q - 1), end - 1) - r * every
    return block, position, position >= tl.maximum(first, start)


@triton.jit(do_not_specialize=["Hkv", "G", "Lq", "Lkv", "audits", "split_blocks"])
def _row_blocks_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    log2_ptr,
    structure_ptr,
    key_valid_ptr,
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
    Hkv,
    G,
    Lq,
    Lkv,
    audits,
    split_blocks,
    exponent,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Grid (tiles of rows, splits, B * Hkv); rows are (head, audited block, sampled row)."""
    # int64 before the first multiply
    b = tl.program_id(2).to(tl.int64) // Hkv
    hk = tl.program_id(2).to(tl.int64) % Hkv
    Nq, Nkv = tl.cdiv(Lq, BLOCK_Q), tl.cdiv(Lkv, BLOCK_KV)
    offset, reach = query_span(offset_ptr, Lq, Lkv)
    start, end = bounds_of(bounds_ptr, b, reach)
    t = tl.program_id(0) * TILE + tl.arange(0, TILE)
    there = t < G * audits * ROWS
    r = t % ROWS
    step = (t // ROWS) % audits
    h = (b * Hkv + hk) * G + tl.minimum(t // (ROWS * audits), G - 1)  # [TILE] int64
    _, position, valid = sampled_rows(start, end, offset, Nq, step, r, audits, BLOCK_Q, ROWS)
    there = there & valid
    position = tl.where(there, position, -1)
    j_first = tl.program_id(1) * split_blocks
    last = tl.max(position, 0)
    j_last = tl.minimum(j_first + split_blocks, tl.where(last < 0, 0, last // BLOCK_KV + 1))
    if j_first < j_last:
        d = tl.arange(0, BLOCK_D)
        token = tl.maximum(position - offset, 0).to(tl.int64)
        q_ptrs = q_ptr + b * stride_qb + (h % (Hkv * G)) * stride_qh + token * stride_ql
        q = tl.load(
            q_ptrs[:, None] + d[None, :] * stride_qd,
            mask=there[:, None] & (d < D)[None, :],
            other=0.0,
        )
        k_ptr += b * stride_kb + hk * stride_kh
        v_ptr += b * stride_vb + hk * stride_vh
        if key_valid_ptr is not None:
            key_valid_ptr += b * Lkv
        # [TILE] int64: where a row's values for block 0 are
        slot = (h * audits + step) * Nkv * ROWS + r
        top = tl.full([TILE], float("-inf"), tl.float32)
        j_masked = j_first
        if key_valid_ptr is None:
            # blocks that every row sees whole need no mask
            least = tl.min(tl.where(there, position, 2147483647), 0)
            j_masked = tl.minimum(tl.maximum((least + 1) // BLOCK_KV, j_first), j_last)
            for blk in tl.range(j_first, j_masked, num_stages=NUM_STAGES):
                tile_top = _block_output(
                    q, k_ptr, v_ptr, key_valid_ptr, out_ptr, log2_ptr, slot, stride_kl, stride_kd,
                    stride_vl, stride_vd, position, there, blk, Lkv, exponent,
                    D, BLOCK_D, DV, BLOCK_DV, BLOCK_KV, ROWS, False,
                )  # fmt: skip
                top = tl.maximum(top, tile_top)
        for blk in tl.range(j_masked, j_last, num_stages=NUM_STAGES):
            tile_top = _block_output(
                q, k_ptr, v_ptr, key_valid_ptr, out_ptr, log2_ptr, slot, stride_kl, stride_kd,
                stride_vl, stride_vd, position, there, blk, Lkv, exponent,
                D, BLOCK_D, DV, BLOCK_DV, BLOCK_KV, ROWS, True,
            )  # fmt: skip
            top = tl.maximum(top, tile_top)
        structure = structure_sum(
            q, k_ptr, key_valid_ptr, stride_kl, stride_kd, position, j_first, j_last, start, end,
            Lkv, exponent, top, D, BLOCK_D, BLOCK_KV,
        )  # fmt: skip
        structure_ptrs = structure_ptr + (h * tl.num_programs(1) + tl.program_id(1)) * ROWS + r
        tl.store(structure_ptrs, log2_sum(top, structure), mask=there & (step == audits - 1))


@triton.jit
def _block_output(
    q, k_ptr, v_ptr, key_valid_ptr, out_ptr, log2_ptr, slot, stride_kl, stride_kd, stride_vl,
    stride_vd, position, there, blk, Lkv, exponent, D: tl.constexpr, BLOCK_D: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_KV: tl.constexpr, ROWS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Store the rows' attention over key block blk; return the largest logit [TILE], in log2."""
    n = tl.arange(0, BLOCK_KV)
    dv = tl.arange(0, BLOCK_DV)
    dots = key_dots(
        q, k_ptr, key_valid_ptr, stride_kl, stride_kd, position, blk, Lkv,
        D, BLOCK_D, BLOCK_KV, MASKED,
    )  # fmt: skip
    top, weights = exponentials(dots, exponent)
    v_ptrs = v_ptr + tl.cast(blk, tl.int64) * BLOCK_KV * stride_vl
    v_ptrs = v_ptrs + (n[:, None] * stride_vl + dv[None, :] * stride_vd)
    if MASKED:
        exists = blk * BLOCK_KV + n < Lkv
        if key_valid_ptr is not None:
            # what stands in padding may be NaN
            key_there = tl.load(key_valid_ptr + blk * BLOCK_KV + n, mask=exists, other=0)
            exists = exists & (key_there != 0)
        v = tl.load(v_ptrs, mask=exists[:, None] & (dv < DV)[None, :], other=0.0)
    elif BLOCK_DV != DV:
        v = tl.load(v_ptrs, mask=(dv < DV)[None, :], other=0.0)
    else:
        v = tl.load(v_ptrs)
    total = tl.sum(weights, 1)
    out = tl.dot(weights.to(v.dtype), v) / tl.where(total == 0, 1.0, total)[:, None]
    at = slot + tl.cast(blk, tl.int64) * ROWS
    tl.store(log2_ptr + at, log2_sum(top, total), mask=there)
    out_ptrs = out_ptr + at[:, None] * DV + dv[None, :]
    tl.store(out_ptrs, out, mask=there[:, None] & (dv < DV)[None, :])
    return top
