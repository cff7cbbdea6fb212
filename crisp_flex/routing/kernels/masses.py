"""Stage `probe` on the GPU, second half: attention masses from the sums of the pass over the keys.

Oracle: routing.probe.probe, with probe.py. Bound by bytes: the sums are read once.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from crisp_flex.routing.kernels.layout import Layout
from crisp_flex.routing.kernels.positions import (
    WINDOW,
    audit_range,
    bounds_of,
    key_blocks_seen,
    proxy_range,
    query_span,
)
from crisp_flex.routing.kernels.probe import Sums
from crisp_flex.routing.kernels.tile import log2_sum

# Key blocks per program of the reduction, and at once; splits of the rows' sums at once.
MASS_BLOCKS = 64
MASS_TILE = 16
MASS_SPLITS = 32
MASS_WARPS = 4


@dataclass(frozen=True, slots=True)
class Masses:
    """Mean attention mass over the valid rows of each row set; 0 if there are none.

    One row of unknown attention, NaN or Inf among its logits, makes all masses of its set NaN.

    Attributes:
        mass: [B, Hq, audit_rows + planes, Nkv] fp32: per key block of each audited block, then of
            the proxy rows by distance plane; the planes add up to p_v.
        c_struct: [B, Hq] fp32.
        by_slot: [B, Hq, slots, Nkv] fp32: p_v split by the query blocks of the proxy rows, the
            last one first; slots 0 unless asked for.
    """

    mass: Tensor
    c_struct: Tensor
    by_slot: Tensor


def masses(sums: Sums, layout: Layout, *, audit_rows: int, by_slot: bool = False) -> Masses:
    """The masses that the sums of one pass hold."""
    x = layout
    slots = x.proxy_slots if by_slot else 0
    slot_mass = sums.proxy_tiles.new_empty((x.B, x.Hq, slots, x.Nkv))
    own = sums.audit_tiles.shape[2]
    mass = sums.proxy_tiles.new_empty((x.B, x.Hq, audit_rows + x.planes, x.Nkv))
    c_struct = sums.proxy_tiles.new_empty((x.B, x.Hq))
    _mass_kernel[(triton.cdiv(x.Nkv, MASS_BLOCKS), own + 1, x.B * x.Hq)](
        sums.audit_tiles,
        sums.proxy_tiles,
        sums.audit_splits,
        sums.proxy_splits,
        mass,
        c_struct,
        slot_mass,
        x.bounds,
        x.q_offset,
        x.Hq,
        x.Lq,
        x.Lkv,
        sums.split_blocks,
        BLOCK_Q=x.block_q,
        BLOCK_KV=x.block_kv,
        AUDITS=audit_rows,
        OWN_AUDITS=own,
        PLANES=x.planes,
        SLOTS=slots,
        CHUNK=MASS_BLOCKS,
        BLOCK_J=MASS_TILE,
        SPLITS=MASS_SPLITS,
        num_warps=MASS_WARPS,
    )
    return Masses(mass, c_struct, slot_mass)


@triton.jit(do_not_specialize=["Hq", "Lq", "Lkv", "split_blocks"])
def _mass_kernel(
    audit_tile_ptr,
    proxy_tile_ptr,
    audit_split_ptr,
    proxy_split_ptr,
    mass_ptr,
    c_struct_ptr,
    slot_ptr,
    bounds_ptr,
    offset_ptr,
    Hq,
    Lq,
    Lkv,
    split_blocks,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    AUDITS: tl.constexpr,
    OWN_AUDITS: tl.constexpr,
    PLANES: tl.constexpr,
    SLOTS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_J: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Grid (chunks of key blocks, row sets, B * Hq): masses of a row set in a chunk."""
    chunk = tl.program_id(0)
    step = tl.program_id(1)
    bh = tl.program_id(2).to(tl.int64)  # before the first multiply
    offset, reach = query_span(offset_ptr, Lq, Lkv)
    start, end = bounds_of(bounds_ptr, bh // Hq, reach)
    Nkv = tl.cdiv(Lkv, BLOCK_KV)
    splits = tl.cdiv(Nkv, split_blocks)
    mass_ptr += bh * (AUDITS + PLANES) * Nkv
    if step < OWN_AUDITS:
        Nq = tl.cdiv(Lq, BLOCK_Q)
        first, lo, hi = audit_range(start, end, offset, Nq, step, AUDITS, BLOCK_Q)
        seen = key_blocks_seen(first, lo, hi, BLOCK_Q, BLOCK_KV)
        tile_ptr = audit_tile_ptr + (bh * OWN_AUDITS + step) * Nkv * BLOCK_Q
        split_ptr = audit_split_ptr + (bh * OWN_AUDITS + step) * splits * BLOCK_Q
        used = tl.cdiv(seen, split_blocks)
        weight, log2_total = _row_weights(first, lo, hi, split_ptr, used, BLOCK_Q, SPLITS)
        for j in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, Nkv), BLOCK_J):
            blk = j + tl.arange(0, BLOCK_J)
            mass = _tile_mass(tile_ptr, blk, seen, weight, log2_total, BLOCK_Q)
            tl.store(mass_ptr + step * Nkv + blk, mass, mask=blk < Nkv)
    else:
        first, lo, hi = proxy_range(start, end, offset, Lq)
        seen = key_blocks_seen(first, lo, hi, WINDOW, BLOCK_KV)
        tile_ptr = proxy_tile_ptr + bh * PLANES * Nkv * WINDOW
        split_ptr = proxy_split_ptr + bh * 2 * splits * WINDOW
        used = tl.cdiv(seen, split_blocks)
        proxy_weight, proxy_total = _row_weights(first, lo, hi, split_ptr, used, WINDOW, SPLITS)
        for j in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, Nkv), BLOCK_J):
            blk = j + tl.arange(0, BLOCK_J)
            total = tl.zeros([BLOCK_J], tl.float32)
            for c in tl.static_range(PLANES):
                plane_ptr = tile_ptr + c * tl.cast(Nkv, tl.int64) * WINDOW
                mass = _tile_mass(plane_ptr, blk, seen, proxy_weight, proxy_total, WINDOW)
                tl.store(mass_ptr + (AUDITS + c) * Nkv + blk, mass, mask=blk < Nkv)
                total += mass
            if OWN_AUDITS < AUDITS:
                # the proxy rows are the last audited block
                tl.store(mass_ptr + (AUDITS - 1) * Nkv + blk, total, mask=blk < Nkv)
            for s in tl.static_range(SLOTS):
                last = tl.maximum(hi - 1 - offset, 0) // BLOCK_Q
                row = tl.maximum(first + tl.arange(0, WINDOW) - offset, 0)
                weight = tl.where(row // BLOCK_Q == last - s, proxy_weight, 0.0)
                part = tl.zeros([BLOCK_J], tl.float32)
                for c in tl.static_range(PLANES):
                    plane_ptr = tile_ptr + c * tl.cast(Nkv, tl.int64) * WINDOW
                    part += _tile_mass(plane_ptr, blk, seen, weight, proxy_total, WINDOW)
                tl.store(slot_ptr + (bh * SLOTS + s) * Nkv + blk, part, mask=blk < Nkv)
        if chunk == 0:
            _, log2_structure = _row_weights(
                first, lo, hi, split_ptr + splits * WINDOW, used, WINDOW, SPLITS
            )
            shares = tl.exp2(log2_structure - proxy_total) * proxy_weight
            tl.store(c_struct_ptr + bh, tl.sum(shares, 0))


@triton.jit
def _row_weights(first, lo, hi, split_ptr, used, ROWS: tl.constexpr, SPLITS: tl.constexpr):
    """Weight of each row in a mean over those that count, and log2 of its sum over used splits.

    The log2 of a row that does not count is 0, so that differences with it are no NaN.
    """
    row = tl.arange(0, ROWS)
    counts = (first + row >= lo) & (first + row < hi)
    weight = counts.to(tl.float32) / tl.maximum(tl.sum(counts.to(tl.float32), 0), 1.0)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for s in range(0, used, SPLITS):
        split = s + tl.arange(0, SPLITS)
        sums = tl.load(
            split_ptr + split[:, None] * ROWS + row[None, :],
            mask=(split < used)[:, None] & counts[None, :],
            other=float("-inf"),
        )  # [SPLITS, ROWS]
        new_top = tl.maximum(top, tl.max(sums, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp2(top - base) + tl.sum(tl.exp2(sums - base[None, :]), 0)
        top = new_top
    return weight, tl.where(counts, log2_sum(top, total), 0.0)


@triton.jit
def _tile_mass(tile_ptr, blk, seen, weight, log2_total, ROWS: tl.constexpr):
    """Mean mass of key blocks blk [BLOCK_J], 0 from seen on."""
    row = tl.arange(0, ROWS)
    sums = tl.load(
        tile_ptr + blk.to(tl.int64)[:, None] * ROWS + row[None, :],
        mask=(blk < seen)[:, None] & (weight > 0)[None, :],
        other=float("-inf"),
    )
    return tl.sum(tl.exp2(sums - log2_total[None, :]) * weight[None, :], 1)
