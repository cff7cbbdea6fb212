"""Stage `probe` on the GPU, first half: one pass over the keys for the rows that are measured.

Oracle: routing.probe.probe, with masses.py. Source of what is measured: FlexPrefill, arXiv
2502.20766, and CRISP, arXiv 2609.01925. One pass instead of two: a tile leaves the log2 of each
row's sum of exponentials, and a block's mass is what that holds of the row's whole sum. Bound by
tl.dot and exp2 (as many of each as attention's forward has for these rows); the sums are
1 / block_kv of a map, written and read once.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from crisp_flex.routing.geometry import WINDOW_TOKENS
from crisp_flex.routing.kernels.layout import Layout
from crisp_flex.routing.kernels.positions import (
    audit_range,
    bounds_of,
    key_blocks_seen,
    proxy_range,
    query_span,
)
from crisp_flex.routing.kernels.tile import LOG2_E, add_tile, log2_sum, structure_sum

# H200, 2026-11-30, bench_route --sweep at 8k, 32k and 128k (32/8 heads, D 128, bf16): the best of
# eight. 128 registers, so that two programs share a multiprocessor, one in its dots while the other
# is in its exponentials: 1.18 ms at 128k; 4 warps 1.36, 256 rows (2 heads) 1.37, 3 stages 1.50.
TILE_ROWS = 128
NUM_WARPS = 8
NUM_STAGES = 2
REGISTERS = 128
# Key blocks per program: enough to pay for loading the rows, few enough for some waves of programs.
LEAST_SPLIT, MOST_SPLIT = 8, 32


@dataclass(frozen=True, slots=True)
class Sums:
    """What one pass over the keys leaves, log2 of sums of exponentials, fp32.

    Values of rows that do not count, and of key blocks that a row set does not see, are undefined.
    """

    # [B, Hq, own audits, Nkv, block_q] and [B, Hq, planes, Nkv, 128]: per key block and row. Plane
    # c of block J has the pairs with a distance in bin first_position // block_kv - J + c - 1
    audit_tiles: Tensor
    proxy_tiles: Tensor
    # [B, Hq, own audits, splits, block_q] and [B, Hq, 2, splits, 128]: per split of the keys;
    # second of the proxy rows: only the first and the last 128 keys
    audit_splits: Tensor
    proxy_splits: Tensor
    split_blocks: int


def probe(query: Tensor, key: Tensor, layout: Layout, *, scale: float, audit_rows: int) -> Sums:
    """One pass over the keys for the proxy rows, and one for the audited blocks.

    If the proxy rows are known to be the last audited block, that one is not measured twice.

    Args:
        query: [B, Hq, Lq, D], any strides.
        key: [B, Hkv, Lkv, D], any strides.
        layout: Of this call.
        scale: Factor on the logits.
        audit_rows: Query blocks to audit; 0 for the proxy rows alone.
    """
    x = layout
    own = max(audit_rows - x.proxy_is_last_audit, 0)
    split_blocks = min(max(x.Nkv // 16, LEAST_SPLIT), MOST_SPLIT)
    splits = triton.cdiv(x.Nkv, split_blocks)

    def empty(*shape: int) -> Tensor:
        return query.new_empty((x.B, x.Hq, *shape), dtype=torch.float32)

    sums = Sums(
        audit_tiles=empty(own, x.Nkv, x.block_q),
        proxy_tiles=empty(x.planes, x.Nkv, WINDOW_TOKENS),
        audit_splits=empty(own, splits, x.block_q),
        proxy_splits=empty(2, splits, WINDOW_TOKENS),
        split_blocks=split_blocks,
    )
    numbers = (x.Hkv, x.G, x.Lq, x.Lkv, scale, split_blocks, audit_rows, own)
    for tiles, by_split, rows, planes in (
        (sums.proxy_tiles, sums.proxy_splits, WINDOW_TOKENS, x.planes),
        (sums.audit_tiles, sums.audit_splits, x.block_q, 0),
    ):
        heads = min(TILE_ROWS // rows, triton.next_power_of_2(x.G))
        sets = 1 if planes else own
        if sets == 0:
            continue
        _probe_kernel[(triton.cdiv(x.G, heads) * sets, splits, x.B * x.Hkv)](
            query,
            key,
            tiles,
            by_split,
            x.key_valid,
            x.bounds,
            x.q_offset,
            *query.stride(),
            *key.stride(),
            *numbers,
            D=x.D,
            BLOCK_D=x.BLOCK_D,
            BLOCK_Q=x.block_q,
            BLOCK_KV=x.block_kv,
            ROWS=rows,
            HEADS=heads,
            PLANES=planes,
            NUM_STAGES=NUM_STAGES,
            num_warps=NUM_WARPS,
            # wider heads leave no shared memory for a second program, and the dots of other GPUs
            # hold their operands in registers
            maxnreg=REGISTERS if x.D <= 128 and has_wgmma(query.device) else None,
        )
    return sums


@functools.cache
def has_wgmma(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9


@triton.jit(do_not_specialize=["Hkv", "G", "Lq", "Lkv", "split_blocks", "audits", "own_audits"])
def _probe_kernel(
    q_ptr,
    k_ptr,
    tile_ptr,
    split_ptr,
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
    Hkv,
    G,
    Lq,
    Lkv,
    scale,
    split_blocks,
    audits,
    own_audits,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    PLANES: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Grid (row sets * tiles of heads, splits, B * Hkv): ROWS rows of HEADS heads over a split.

    PLANES is 0 for audited blocks. What comes first in the grid runs together and reads the same
    keys.
    """
    head_tiles = tl.cdiv(G, HEADS)
    step = tl.program_id(0) // head_tiles
    split = tl.program_id(1)
    # int64 before the first multiply
    b = tl.program_id(2).to(tl.int64) // Hkv
    hk = tl.program_id(2).to(tl.int64) % Hkv
    Nkv = tl.cdiv(Lkv, BLOCK_KV)
    offset, reach = query_span(offset_ptr, Lq, Lkv)
    start, end = bounds_of(bounds_ptr, b, reach)
    if PLANES == 0:
        Nq = tl.cdiv(Lq, BLOCK_Q)
        first, lo, hi = audit_range(start, end, offset, Nq, step, audits, BLOCK_Q)
    else:
        first, lo, hi = proxy_range(start, end, offset, Lq)
    j_first = split * split_blocks
    j_last = tl.minimum(j_first + split_blocks, key_blocks_seen(first, lo, hi, ROWS, BLOCK_KV))
    if j_first < j_last:
        m = tl.arange(0, HEADS * ROWS)
        row = m % ROWS
        g = (tl.program_id(0) % head_tiles) * HEADS + m // ROWS
        is_head = g < G
        position = first + row
        counts = (position >= lo) & (position < hi) & is_head
        d = tl.arange(0, BLOCK_D)
        h = hk * G + g  # [M] int64
        q_ptrs = q_ptr + b * stride_qb + h * stride_qh
        q_ptrs = q_ptrs + (position - offset).to(tl.int64) * stride_ql
        q = tl.load(
            q_ptrs[:, None] + d[None, :] * stride_qd,
            mask=counts[:, None] & (d < D)[None, :],
            other=0.0,
        )  # [M, BLOCK_D]
        k_ptr += b * stride_kb + hk * stride_kh
        if key_valid_ptr is not None:
            key_valid_ptr += b * Lkv
        bh = b * Hkv * G + h
        if PLANES == 0:
            tile_ptrs = tile_ptr + (bh * own_audits + step) * Nkv * ROWS + row
            split_ptrs = split_ptr + (bh * own_audits + step) * tl.num_programs(1) * ROWS + row
        else:
            tile_ptrs = tile_ptr + bh * PLANES * Nkv * ROWS + row
            split_ptrs = split_ptr + bh * 2 * tl.num_programs(1) * ROWS + row
        exponent = scale * LOG2_E
        top = tl.full([HEADS * ROWS], float("-inf"), tl.float32)
        total = tl.zeros([HEADS * ROWS], tl.float32)
        if key_valid_ptr is None:
            # blocks that lie before the first row need no mask
            j_masked = tl.minimum(tl.maximum((first + 1) // BLOCK_KV, j_first), j_last)
            for blk in tl.range(j_first, j_masked, num_stages=NUM_STAGES):
                top, total = add_tile(
                    q, k_ptr, tile_ptrs, key_valid_ptr, stride_kl, stride_kd, position, is_head,
                    blk, first, Lkv, exponent, top, total,
                    D, BLOCK_D, BLOCK_KV, ROWS, PLANES, False,
                )  # fmt: skip
            for blk in tl.range(j_masked, j_last, num_stages=1):
                top, total = add_tile(
                    q, k_ptr, tile_ptrs, key_valid_ptr, stride_kl, stride_kd, position, is_head,
                    blk, first, Lkv, exponent, top, total,
                    D, BLOCK_D, BLOCK_KV, ROWS, PLANES, True,
                )  # fmt: skip
        else:
            for blk in tl.range(j_first, j_last, num_stages=NUM_STAGES):
                top, total = add_tile(
                    q, k_ptr, tile_ptrs, key_valid_ptr, stride_kl, stride_kd, position, is_head,
                    blk, first, Lkv, exponent, top, total,
                    D, BLOCK_D, BLOCK_KV, ROWS, PLANES, True,
                )  # fmt: skip
        split_ptrs = split_ptrs + split * ROWS
        tl.store(split_ptrs, log2_sum(top, total), mask=is_head)
        if PLANES > 0:
            structure = structure_sum(
                q, k_ptr, key_valid_ptr, stride_kl, stride_kd, position, j_first, j_last,
                start, hi, Lkv, exponent, top, D, BLOCK_D, BLOCK_KV,
            )  # fmt: skip
            structure_ptrs = split_ptrs + tl.num_programs(1) * ROWS
            tl.store(structure_ptrs, log2_sum(top, structure), mask=is_head)
