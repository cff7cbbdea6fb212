"""Stage `audit` on the GPU, first part: how many multiples of its floor each line passes.

Oracle: routing.lines.select_lines and cover. Source of the floor: CRISP, arXiv 2609.01925. Reads
vectors of Nkv per head; bound by latency. A level is the number of multiples that a value passes,
of the smallest ones; 7 stands for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from crisp_flex.routing.kernels.layout import Layout
from crisp_flex.routing.kernels.lines import (
    line_level,
    mean_floor,
    slash_kinds,
    slash_mass,
    slash_span,
    vertical_kinds,
    vertical_mass,
)
from crisp_flex.routing.kernels.masses import Masses
from crisp_flex.routing.kernels.positions import WINDOW, bounds_of, own_bin, proxy_range, query_span

# Multiples of the floor, as in policies.hybrid: the sparsest last. Level 0 passes none of them.
MULTIPLES = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
# Lines must reach this many times the multiple of the rows.
LINE_FACTOR = 2.0
NUM_WARPS = 8


@dataclass(frozen=True, slots=True)
class Levels:
    """Level of each line, and of what every policy keeps.

    Attributes:
        verticals: [B, Hq, Nkv] int8, by key block.
        slashes: [B, Hq, phases, Nkv + 2] int8: the best of the slashes that touch a block, by
            (last bin of its query block) - block. Query block i is of phase i % phases.
    """

    verticals: Tensor
    slashes: Tensor


def levels(measured: Masses, layout: Layout) -> Levels:
    """The levels of the lines that the proxy rows show."""
    x = layout
    out = Levels(
        verticals=torch.empty((x.B, x.Hq, x.Nkv), dtype=torch.int8, device=measured.mass.device),
        slashes=torch.empty(
            (x.B, x.Hq, x.phases, x.Nkv + 2), dtype=torch.int8, device=measured.mass.device
        ),
    )
    _levels_kernel[(x.B * x.Hq,)](
        measured.mass,
        out.verticals,
        out.slashes,
        x.first_valid,
        x.bounds,
        x.q_offset,
        x.Hq,
        x.Lq,
        x.Lkv,
        BLOCK_Q=x.block_q,
        BLOCK_KV=x.block_kv,
        AUDITS=measured.mass.shape[2] - x.planes,
        PLANES=x.planes,
        PHASES=x.phases,
        BINS=x.slash_bins,
        MULTIPLES=MULTIPLES,
        LINE_FACTOR=LINE_FACTOR,
        CHUNK=min(1024, triton.next_power_of_2(x.Nkv + 2)),
        num_warps=NUM_WARPS,
    )
    return out


@triton.jit(do_not_specialize=["Hq", "Lq", "Lkv"])
def _levels_kernel(
    mass_ptr,
    verticals_ptr,
    slashes_ptr,
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
    BINS: tl.constexpr,
    MULTIPLES: tl.constexpr,
    LINE_FACTOR: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (B * Hq,)."""
    bh = tl.program_id(0).to(tl.int64)  # before the first multiply
    b = bh // Hq
    Nkv = tl.cdiv(Lkv, BLOCK_KV)
    offset, reach = query_span(offset_ptr, Lq, Lkv)
    start, end = bounds_of(bounds_ptr, b, reach)
    proxy_ptr = mass_ptr + (bh * (AUDITS + PLANES) + AUDITS) * Nkv
    first_proxy, _, _ = proxy_range(start, end, offset, Lq)
    first_bin = own_bin(first_proxy, WINDOW, BLOCK_KV)

    v_rest = tl.zeros([CHUNK], tl.float32)
    s_rest = tl.zeros([CHUNK], tl.float32)
    v_others = tl.zeros([CHUNK], tl.int32)
    s_others = tl.zeros([CHUNK], tl.int32)
    v_entries = tl.zeros([CHUNK], tl.int32)
    s_entries = tl.zeros([CHUNK], tl.int32)
    for j in range(0, Nkv, CHUNK):
        blk = j + tl.arange(0, CHUNK)
        v_anchor, v_entry = vertical_kinds(
            first_valid_ptr, b, blk, start, end, reach, Nkv, BLOCK_KV
        )
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

    for j in range(0, Nkv, CHUNK):
        blk = j + tl.arange(0, CHUNK)
        v_anchor, v_entry = vertical_kinds(
            first_valid_ptr, b, blk, start, end, reach, Nkv, BLOCK_KV
        )
        v_mass = vertical_mass(proxy_ptr, blk, Nkv, PLANES)
        v_level = line_level(v_mass, v_floor, v_anchor, v_entry, MULTIPLES, LINE_FACTOR)
        tl.store(verticals_ptr + bh * Nkv + blk, v_level.to(tl.int8), mask=blk < Nkv)
    for phase in tl.static_range(PHASES):
        span = slash_span(phase, offset, BLOCK_Q, BLOCK_KV)
        for j in range(0, Nkv + 2, CHUNK):
            t = j + tl.arange(0, CHUNK)
            # the diagonals that distances below 128 tokens touch are always kept
            level = tl.where(t <= span + (WINDOW - 1) // BLOCK_KV, 7, 0)
            for i in tl.static_range(BINS):
                bins = t - i
                s_anchor, s_entry = slash_kinds(bins, start, end, offset, BLOCK_KV)
                touches = (i <= span) & (bins >= 0) & (bins < Nkv)
                s_mass = slash_mass(proxy_ptr, bins, first_bin, Nkv, PLANES)
                s_level = line_level(s_mass, s_floor, s_anchor, s_entry, MULTIPLES, LINE_FACTOR)
                level = tl.maximum(level, tl.where(touches, s_level, 0))
            out_ptrs = slashes_ptr + (bh * PHASES + phase) * (Nkv + 2) + t
            tl.store(out_ptrs, level.to(tl.int8), mask=t < Nkv + 2)
