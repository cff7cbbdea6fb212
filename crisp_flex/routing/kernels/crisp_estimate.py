"""Stage `estimate` of policy "crisp" on the GPU: what the pooled-estimate heads keep.

Oracle: routing.pool.pooled_map and routing.top_mass. Source: CRISP, arXiv 2609.01925, PE
route. The pooled map is made a tile at a time: once for the softmax of each row, then a few times
for the mass above a ladder of thresholds, which closes in on the one that gamma asks for. A ladder
is a cumulative histogram in log space. Bound by the dots of the map and the sums of the ladder;
heads of the other route cost nothing. Partial sums have a fixed order: no atomics.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from crisp_flex.routing.guards import ROUTE_ESTIMATE
from crisp_flex.routing.kernels.crisp_map import map_logits
from crisp_flex.routing.kernels.layout import Layout
from crisp_flex.routing.kernels.positions import (
    bounds_of,
    first_keys,
    kv_head_of,
    query_span,
    tile_extent,
)
from crisp_flex.routing.kernels.tile import LOG2_E, log2_sum
from crisp_flex.routing.params import RouteParams

# Each level divides the range of thresholds by the rungs of its ladder. From 16 octaves (128k,
# gamma .95) three levels leave 1/2000 of an octave, which holds some 1e-4 of the mass.
LEVELS = 3
RUNGS = tl.constexpr(32)
# Octaves below 1 that the first ladder covers at most: normal fp32 numbers.
_MOST_OCTAVES = 126.0

TILE_ROWS = tl.constexpr(64)
TILE_BLOCKS = tl.constexpr(64)
NUM_WARPS = 4
NUM_STAGES = 2


@dataclass(frozen=True, slots=True)
class Estimate:
    """The pooled map of each pooled-estimate head, as far as it decides.

    Attributes:
        row_log2: [B, Hq, Nq] fp32: log2 of the row's sum of exponentials; inf for a row that does
            not count, NaN for one with NaN in it, of which no entry is above a rung. An entry of
            the map is exp2(logit * log2(e) - row_log2).
        above: [LEVELS, B, Hq, tiles of rows, RUNGS] fp32: mass above each rung.
        gamma: Share of the mass to keep.
        octaves: Range of the first ladder.
    """

    row_log2: Tensor
    above: Tensor
    gamma: float
    octaves: float


def estimate(
    mean_query: Tensor, mean_key: Tensor, route: Tensor, layout: Layout, params: RouteParams
) -> Estimate:
    """Softmax of the pooled rows, and the masses that lead to each head's threshold.

    Args:
        mean_query: [B, Hq, Nq, D] fp32, contiguous.
        mean_key: [B, Hkv, Nkv, D] fp32, contiguous.
        route: [B, Hq] fp32.
        layout: Of this call.
        params: scale and gamma.
    """
    x = layout
    tiles = triton.cdiv(x.Nq, TILE_ROWS.value)
    octaves = first_octaves(x.Nkv, params.gamma)
    out = Estimate(
        row_log2=mean_query.new_empty((x.B, x.Hq, x.Nq)),
        above=mean_query.new_empty((LEVELS, x.B, x.Hq, tiles, RUNGS.value)),
        gamma=params.gamma,
        octaves=octaves,
    )
    for level in range(-1, LEVELS):
        _estimate_kernel[(tiles, x.B * x.Hq)](
            mean_query,
            mean_key,
            route,
            out.row_log2,
            out.above,
            x.first_valid,
            x.bounds,
            x.q_offset,
            x.B * x.Hq,
            x.Hq,
            x.Hkv,
            x.Lq,
            x.Lkv,
            params.scale * LOG2_E.value,
            params.gamma,
            octaves,
            D=x.D,
            BLOCK_D=x.BLOCK_D,
            BLOCK_Q=x.block_q,
            BLOCK_KV=x.block_kv,
            LEVEL=level,
            ESTIMATE=ROUTE_ESTIMATE,
            num_warps=NUM_WARPS,
            num_stages=NUM_STAGES,
        )
    return out


def first_octaves(Nkv: int, gamma: float) -> float:
    """Octaves below 1 that the first ladder spans.

    What lies below its last rung holds, even if all entries do, less than 1 - gamma of the mass.
    """
    missed = max(1.0 - gamma, 2.0**-_MOST_OCTAVES)
    return min(math.log2(Nkv / missed) + 1.0, _MOST_OCTAVES)


@triton.jit(do_not_specialize=["heads", "Hq", "Hkv", "Lq", "Lkv"])
def _estimate_kernel(
    mean_q_ptr,
    mean_k_ptr,
    route_ptr,
    row_log2_ptr,
    above_ptr,
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
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    LEVEL: tl.constexpr,
    ESTIMATE: tl.constexpr,
):
    """Grid (tiles of query blocks, B * Hq), longest rows first; LEVEL -1 is the softmax."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)  # before the first multiply
    if tl.load(route_ptr + bh) == ESTIMATE:
        b, kv_head = kv_head_of(bh, Hq, Hkv)
        Nq, Nkv = tl.cdiv(Lq, BLOCK_Q), tl.cdiv(Lkv, BLOCK_KV)
        offset, reach = query_span(offset_ptr, Lq, Lkv)
        row = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
        there = row < Nq
        q_first, q_last, limit = tile_extent(row, there, offset, reach, BLOCK_Q, BLOCK_KV)
        mean_q_ptr += bh * Nq * D
        mean_k_ptr += kv_head * Nkv * D
        row_log2_ptrs = row_log2_ptr + bh * Nq + row
        if LEVEL < 0:
            top = tl.full([TILE_ROWS], float("-inf"), tl.float32)
            total = tl.zeros([TILE_ROWS], tl.float32)
            for j in range(0, limit, TILE_BLOCKS):
                blk = j + tl.arange(0, TILE_BLOCKS)
                keys = first_keys(first_valid_ptr, b, blk, Nkv, BLOCK_KV)
                logits = map_logits(mean_q_ptr, mean_k_ptr, row, blk, Nq, Nkv, exponent, D, BLOCK_D)
                logits = tl.where(keys[None, :] <= q_last[:, None], logits, float("-inf"))
                new_top = tl.maximum(top, tl.max(logits, 1))
                base = tl.where(new_top == float("-inf"), 0.0, new_top)
                total = total * tl.exp2(top - base) + tl.sum(tl.exp2(logits - base[:, None]), 1)
                top = new_top
            start, end = bounds_of(bounds_ptr, b, reach)
            # NaN counts
            counts = ~(total <= 0) & (q_last >= start) & (q_first < end)
            row_log2 = tl.where(counts, log2_sum(top, total), float("inf"))
            tl.store(row_log2_ptrs, row_log2, mask=there)
        else:
            row_log2 = tl.load(row_log2_ptrs, mask=there, other=float("inf"))
            tiles = tl.num_programs(0)
            low, high = threshold(above_ptr, heads, bh, tiles, gamma, octaves, LEVEL)
            step = _rung_step(low, high, octaves, LEVEL)
            above = tl.zeros([RUNGS], tl.float32)
            for j in range(0, limit, TILE_BLOCKS):
                blk = j + tl.arange(0, TILE_BLOCKS)
                keys = first_keys(first_valid_ptr, b, blk, Nkv, BLOCK_KV)
                logits = map_logits(mean_q_ptr, mean_k_ptr, row, blk, Nq, Nkv, exponent, D, BLOCK_D)
                logits = logits - row_log2[:, None]
                logits = tl.where(keys[None, :] <= q_last[:, None], logits, float("-inf"))
                probs = tl.exp2(logits)
                for t in tl.range(0, RUNGS):
                    rung = tl.where(t == RUNGS - 1, low, high - (t + 1) * step)
                    mass = tl.sum(tl.sum(tl.where(logits > rung, probs, 0.0), 1), 0)
                    above += tl.where(tl.arange(0, RUNGS) == t, mass, 0.0)
            # tiles of a head lie side by side, to be added up in their order
            above_ptrs = (
                above_ptr + ((LEVEL * tl.cast(heads, tl.int64) + bh) * tiles + tile) * RUNGS
            )
            tl.store(above_ptrs + tl.arange(0, RUNGS), above)


@triton.jit
def threshold(above_ptr, heads, bh, tiles, gamma, octaves, LEVELS: tl.constexpr):
    """log2 of two entries after LEVELS ladders: what is above low holds gamma of the mass.

    What is above high does not, so the sought threshold lies between. low is -inf if it lies below
    the first ladder; then it stays there.
    """
    low = tl.full([], float("-inf"), tl.float32)
    high = tl.full([], 0.0, tl.float32)
    target = tl.full([], 0.0, tl.float32)
    t = tl.arange(0, RUNGS)
    for level in tl.static_range(LEVELS):
        row_ptr = above_ptr + (level * tl.cast(heads, tl.int64) + bh) * tiles * RUNGS
        mass = tl.zeros([RUNGS], tl.float32)
        for i in tl.range(0, tiles):
            mass += tl.load(row_ptr + i * RUNGS + t)
        if level == 0:
            # the last rung of the first ladder is below everything
            target = gamma * tl.sum(tl.where(t == RUNGS - 1, mass, 0.0), 0)
        step = _rung_step(low, high, octaves, level)
        first = tl.min(tl.where((mass >= target) & (t < RUNGS - 1), t, RUNGS - 1), 0)
        next_low = tl.where(first == RUNGS - 1, low, high - (first + 1) * step)
        next_high = tl.where(first == 0, high, high - first * step)
        if level == 0:
            low, high = next_low, next_high
        else:
            bounded = low > float("-inf")
            low = tl.where(bounded, next_low, low)
            high = tl.where(bounded, next_high, high)
    return low, high


@triton.jit
def _rung_step(low, high, octaves, LEVEL: tl.constexpr):
    """Distance of two rungs; the last one stands at low, which is -inf at first."""
    if LEVEL == 0:
        return octaves / (RUNGS - 1)
    # nothing to narrow down if low is -inf
    return tl.where(low > float("-inf"), (high - low) / RUNGS, 0.0)
