"""Device arithmetic of lines and floors, shared by the stages `audit` and `select`.

Oracle: routing.lines and policies.hybrid. Source of the floor: CRISP, arXiv 2609.01925.
"""

from __future__ import annotations

import triton
import triton.language as tl

from crisp_flex.routing.kernels.positions import WINDOW, block_of_start, first_keys


@triton.jit
def vertical_kinds(first_valid_ptr, b, blk, start, end, reach, Nkv, BLOCK_KV: tl.constexpr):
    """Whether key blocks blk are anchors, and whether they are there at all."""
    entry = first_keys(first_valid_ptr, b, blk, Nkv, BLOCK_KV) < reach
    first_block = block_of_start(start, Nkv, BLOCK_KV)
    recent = tl.maximum(end - WINDOW, start) // BLOCK_KV
    last = (end - 1) // BLOCK_KV
    anchor = (blk == first_block) | ((blk >= recent) & (blk <= last))
    return anchor & entry, entry


@triton.jit
def slash_kinds(bins, start, end, offset, BLOCK_KV: tl.constexpr):
    """Whether distance bins are anchors, and whether they occur; bins may be out of range."""
    recent_first = tl.maximum(end - WINDOW, start)
    recent = (end - 1 - recent_first // BLOCK_KV * BLOCK_KV) // BLOCK_KV
    # no bin without a valid key; division rounds towards 0
    last = tl.where(end > start, (end - 1 - start) // BLOCK_KV, -1)
    sink = (tl.maximum(recent_first, offset) - start) // BLOCK_KV
    entry = (bins >= 0) & (bins <= last)
    anchor = (bins <= recent) | (bins >= sink)
    return anchor & entry, entry


@triton.jit
def slash_span(phase, offset, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr):
    """How many bins besides the last one touch a block of a query block of this phase."""
    q_first = phase * BLOCK_Q + offset
    return (q_first + (BLOCK_Q - 1)) // BLOCK_KV - ((q_first + 1) // BLOCK_KV - 1)


@triton.jit
def vertical_mass(proxy_ptr, blk, Nkv, PLANES: tl.constexpr):
    """p_v of key blocks blk: the sum of the distance planes [PLANES, Nkv]."""
    mass = tl.zeros(blk.shape, tl.float32)
    for c in tl.static_range(PLANES):
        mass += tl.load(proxy_ptr + c * Nkv + blk, mask=(blk >= 0) & (blk < Nkv), other=0.0)
    return mass


@triton.jit
def slash_mass(proxy_ptr, bins, first_bin, Nkv, PLANES: tl.constexpr):
    """p_s of distance bins; first_bin is the key block in which the first proxy row lies.

    Plane c of key block blk belongs to bin first_bin - blk + c - 1.
    """
    mass = tl.zeros(bins.shape, tl.float32)
    for c in tl.static_range(PLANES):
        blk = first_bin + (c - 1) - bins
        mass += tl.load(proxy_ptr + c * Nkv + blk, mask=(blk >= 0) & (blk < Nkv), other=0.0)
    return mass


@triton.jit
def mean_floor(rest, others, entries):
    """Mean mass of what is no anchor, at least 1 / (1024 * entries); NaN if rest is."""
    least = 1.0 / (1024 * tl.maximum(entries, 1)).to(tl.float32)
    mean = rest / tl.maximum(others, 1).to(tl.float32)
    return tl.maximum(mean, least, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def row_threshold(rest, total, count):
    """mean_floor of a pooled row from sums of its weights, in the unit of the weights.

    Not divided by total: a lone block between the two ends stays exactly its own mean. NaN if any
    weight is, also one of the ends: such a row keeps all it sees.

    Args:
        rest: Sum of the weights without the first and the last visible block.
        total: Sum of all weights.
        count: Visible blocks.
    """
    least = 1.0 / (1024 * tl.maximum(count, 1)).to(tl.float32)
    mean = rest / tl.maximum(count - 2, 1).to(tl.float32)
    return tl.maximum(mean, total * least, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def value_level(value, floor, MULTIPLES: tl.constexpr):
    """int32: how many of the ascending multiples m hold value > m * floor; all of them for NaN."""
    level = tl.zeros(value.shape, tl.int32)
    for i in tl.static_range(7):
        level += (~(value <= MULTIPLES[i] * floor)).to(tl.int32)
    return level


@triton.jit
def line_level(mass, floor, anchor, entry, MULTIPLES: tl.constexpr, FACTOR: tl.constexpr):
    """Level of lines: all multiples for an anchor, none for what does not occur or is unknown.

    Masses of NaN tell nothing of a line; where they matter the audit keeps the head whole.
    """
    level = tl.zeros(mass.shape, tl.int32)
    for i in tl.static_range(7):
        level += (mass > (FACTOR * MULTIPLES[i]) * floor).to(tl.int32)
    return tl.where(anchor, 7, tl.where(entry, level, 0))


@triton.jit
def choose_level(
    coverage_ptr, target, AUDITS: tl.constexpr, ROWS: tl.constexpr, MINIMUM: tl.constexpr
):
    """Level a head needs of its blocks (0: all blocks, else a multiple's), and the coverage then.

    A row of NaN makes the coverage NaN, which no target is below: the head keeps all blocks.

    Args:
        coverage_ptr: [AUDITS, 8] of the head, -1 in rows that do not count.
        target: Coverage to reach.
        AUDITS: Audited rows.
        ROWS: AUDITS padded to a power of two.
        MINIMUM: Reduce by the minimum instead of the mean.
    """
    row = tl.arange(0, ROWS)
    level = tl.arange(0, 8)
    by_row = tl.load(
        coverage_ptr + row[:, None] * 8 + level[None, :],
        mask=(row < AUDITS)[:, None] & (level >= 0)[None, :],
        other=-1.0,
    )
    counts = ~(by_row < 0)  # NaN counts
    total = tl.sum(tl.where(counts, by_row, 0.0), 0)
    if MINIMUM:
        # which passes over NaN, as the sum does not
        least = tl.min(tl.where(counts, by_row, 1.0), 0)
        reached = tl.where(total == total, least, total)
    else:
        number = tl.sum(counts.to(tl.float32), 0)
        reached = tl.where(number > 0, total / tl.maximum(number, 1.0), 1.0)
    chosen = tl.max(tl.where(reached >= target, level, 0), 0)
    return chosen, tl.sum(tl.where(level == chosen, reached, 0.0), 0)
