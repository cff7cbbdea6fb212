"""Stage `lines` of policy "crisp" on the GPU: which verticals and slashes of a head are kept.

Oracle: routing.lines.select_lines and cover. Source: CRISP, arXiv 2609.01925, vertical-slash route.
Reads vectors of Nkv per head; bound by latency. The k_min largest lines are found by bisection over
the bits of their masses, so there is no sort.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from crisp_flex.routing.guards import ROUTE_VERTICAL_SLASH
from crisp_flex.routing.kernels.layout import Layout
from crisp_flex.routing.kernels.lines import (
    mean_floor,
    slash_kinds,
    slash_mass,
    slash_span,
    vertical_kinds,
    vertical_mass,
)
from crisp_flex.routing.kernels.masses import Masses
from crisp_flex.routing.kernels.positions import WINDOW, bounds_of, own_bin, proxy_range, query_span
from crisp_flex.routing.params import RouteParams

NUM_WARPS = 8


@dataclass(frozen=True, slots=True)
class LineCover:
    """What the kept lines of each head cover; undefined for heads of another route.

    Attributes:
        verticals: [B, Hq, Nkv] int8, by key block.
        slashes: [B, Hq, phases, Nkv + 2] int8: whether a kept slash touches a block, by
            (last bin of its query block) - block. Query block i is of phase i % phases.
    """

    verticals: Tensor
    slashes: Tensor


def cover_lines(route: Tensor, measured: Masses, layout: Layout, params: RouteParams) -> LineCover:
    """The cover of the lines above their floors.

    Args:
        route: [B, Hq] fp32.
        measured: Masses of the proxy rows alone.
        layout: Of this call.
        params: alpha and k_min.
    """
    x = layout
    cover = LineCover(
        verticals=torch.empty((x.B, x.Hq, x.Nkv), dtype=torch.int8, device=route.device),
        slashes=torch.empty(
            (x.B, x.Hq, x.phases, x.Nkv + 2), dtype=torch.int8, device=route.device
        ),
    )
    ranked = route.new_empty((x.B, x.Hq, 2, x.Nkv))
    _lines_kernel[(x.B * x.Hq,)](
        route,
        measured.mass,
        ranked,
        cover.verticals,
        cover.slashes,
        x.first_valid,
        x.bounds,
        x.q_offset,
        x.Hq,
        x.Lq,
        x.Lkv,
        params.alpha,
        params.k_min,
        BLOCK_Q=x.block_q,
        BLOCK_KV=x.block_kv,
        PLANES=x.planes,
        PHASES=x.phases,
        BINS=x.slash_bins,
        LINES=ROUTE_VERTICAL_SLASH,
        CHUNK=min(1024, triton.next_power_of_2(x.Nkv + 2)),
        num_warps=NUM_WARPS,
    )
    return cover


@triton.jit(do_not_specialize=["Hq", "Lq", "Lkv", "k_min"])
def _lines_kernel(
    route_ptr,
    mass_ptr,
    ranked_ptr,
    verticals_ptr,
    slashes_ptr,
    first_valid_ptr,
    bounds_ptr,
    offset_ptr,
    Hq,
    Lq,
    Lkv,
    alpha,
    k_min,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    PLANES: tl.constexpr,
    PHASES: tl.constexpr,
    BINS: tl.constexpr,
    LINES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (B * Hq,)."""
    bh = tl.program_id(0).to(tl.int64)  # before the first multiply
    if tl.load(route_ptr + bh) == LINES:
        Nkv = tl.cdiv(Lkv, BLOCK_KV)
        offset, reach = query_span(offset_ptr, Lq, Lkv)
        mass_ptr += bh * PLANES * Nkv
        ranked_ptr += bh * 2 * Nkv
        v_cut, v_last = _rank(
            ranked_ptr, mass_ptr, first_valid_ptr, bounds_ptr, bh // Hq, Lq, Lkv, offset, reach,
            alpha, k_min, BLOCK_KV, PLANES, CHUNK, False,
        )  # fmt: skip
        for j in range(0, Nkv, CHUNK):
            blk = j + tl.arange(0, CHUNK)
            kept = _passes(ranked_ptr, blk, blk < Nkv, v_cut, v_last)
            tl.store(verticals_ptr + bh * Nkv + blk, kept.to(tl.int8), mask=blk < Nkv)
        ranked_ptr += Nkv
        s_cut, s_last = _rank(
            ranked_ptr, mass_ptr, first_valid_ptr, bounds_ptr, bh // Hq, Lq, Lkv, offset, reach,
            alpha, k_min, BLOCK_KV, PLANES, CHUNK, True,
        )  # fmt: skip
        for phase in tl.static_range(PHASES):
            span = slash_span(phase, offset, BLOCK_Q, BLOCK_KV)
            for j in range(0, Nkv + 2, CHUNK):
                t = j + tl.arange(0, CHUNK)
                touched = t < 0
                for i in tl.static_range(BINS):
                    exists = (t >= i) & (t - i < Nkv) & (i <= span)
                    touched = touched | _passes(ranked_ptr, t - i, exists, s_cut, s_last)
                out_ptrs = slashes_ptr + (bh * PHASES + phase) * (Nkv + 2) + t
                tl.store(out_ptrs, touched.to(tl.int8), mask=t < Nkv + 2)


@triton.jit
def _rank(
    ranked_ptr,
    mass_ptr,
    first_valid_ptr,
    bounds_ptr,
    b,
    Lq,
    Lkv,
    offset,
    reach,
    alpha,
    k_min,
    BLOCK_KV: tl.constexpr,
    PLANES: tl.constexpr,
    CHUNK: tl.constexpr,
    SLASHES: tl.constexpr,
):
    """Store the masses of the lines, and return the mass above which lines are kept.

    That is alpha times the floor, or the k_min-th largest mass if fewer are above it; of those that
    equal it, the ones up to the second number returned are kept. Stored is 2 for an anchor, which
    is above every cut, and -1 for what does not occur.
    """
    start, end = bounds_of(bounds_ptr, b, reach)
    Nkv = tl.cdiv(Lkv, BLOCK_KV)
    rest = tl.zeros([CHUNK], tl.float32)
    others = tl.zeros([CHUNK], tl.int32)
    entries = tl.zeros([CHUNK], tl.int32)
    for j in range(0, Nkv, CHUNK):
        index = j + tl.arange(0, CHUNK)
        if SLASHES:
            first, _, _ = proxy_range(start, end, offset, Lq)
            anchor, entry = slash_kinds(index, start, end, offset, BLOCK_KV)
            mass = slash_mass(mass_ptr, index, own_bin(first, WINDOW, BLOCK_KV), Nkv, PLANES)
        else:
            anchor, entry = vertical_kinds(
                first_valid_ptr, b, index, start, end, reach, Nkv, BLOCK_KV
            )
            mass = vertical_mass(mass_ptr, index, Nkv, PLANES)
        rest += tl.where(entry & ~anchor, mass, 0.0)
        others += (entry & ~anchor).to(tl.int32)
        entries += entry.to(tl.int32)
        ranked = tl.where(anchor, 2.0, tl.where(entry, mass, -1.0))
        tl.store(ranked_ptr + index, ranked, mask=index < Nkv)
    # what other threads stored is read below
    tl.debug_barrier()
    candidates, entered = tl.sum(others, 0), tl.sum(entries, 0)
    # between 1, which no mass exceeds, and what anchors have
    cut = tl.minimum(alpha * mean_floor(tl.sum(rest, 0), candidates, entered), 1.5)
    last = tl.full([], -1, tl.int32)
    wanted = entered - candidates + tl.minimum(k_min, candidates)
    if _count_from(ranked_ptr, cut.to(tl.int32, bitcast=True) + 1, Nkv, CHUNK) < wanted:
        # the largest bit pattern that wanted masses reach; those of masses are below 2**30
        bits = tl.full([], 0, tl.int32)
        for i in tl.range(0, 30):
            trial = bits | (1 << (29 - i))
            reached = _count_from(ranked_ptr, trial, Nkv, CHUNK) >= wanted
            bits = tl.where(reached, trial, bits)
        cut = bits.to(tl.float32, bitcast=True)
        # of equal masses the lower index wins
        rank = _count_from(ranked_ptr, bits + 1, Nkv, CHUNK)
        for j in range(0, Nkv, CHUNK):
            index = j + tl.arange(0, CHUNK)
            equal = tl.load(ranked_ptr + index, mask=index < Nkv, other=-1.0) == cut
            is_last = equal & (rank + tl.cumsum(equal.to(tl.int32), 0) == wanted)
            last = tl.maximum(last, tl.max(tl.where(is_last, index, -1), 0))
            rank += tl.sum(equal.to(tl.int32), 0)
    return cut, last


@triton.jit
def _count_from(ranked_ptr, bits, Nkv, CHUNK: tl.constexpr):
    """How many lines have a mass of bit pattern bits or above, which is the order of masses."""
    count = tl.zeros([CHUNK], tl.int32)
    for j in range(0, Nkv, CHUNK):
        index = j + tl.arange(0, CHUNK)
        ranked = tl.load(ranked_ptr + index, mask=index < Nkv, other=-1.0)
        count += (ranked.to(tl.int32, bitcast=True) >= bits).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def _passes(ranked_ptr, index, exists, cut, last):
    """Which lines are above the cut, or equal to it and of an index up to last."""
    mass = tl.load(ranked_ptr + index, mask=exists, other=-1.0)
    return (mass > cut) | ((mass == cut) & (index <= last))
