"""Which blocks of a row hold a share of its estimated mass, for the stages of policy "bounded".

Oracle: policies.bounded.tail_mass and keep_above. A row drops its smallest blocks as long as their
sum is at most the share: all blocks up to one level, which is found by halving an interval.
"""

from __future__ import annotations

import triton
import triton.language as tl

from crisp_flex.routing.kernels.positions import WINDOW, first_keys

# log2 of the mass: below the interval nothing can add up to the least share, 2^-32 * 2^20 blocks.
_LOWEST = tl.constexpr(-32.0)
# Halvings of [-32, 0]: a block within 2^-15 of the level is kept where a sort would drop it.
_HALVINGS = tl.constexpr(20)


@triton.jit
def row_masses(
    sums_ptr, first_valid_ptr, b, row_ptr_offset, q_last, Nkv, BLOCK_KV: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """blk [N], which the row sees, log2 of their estimated mass [N] fp32, and of the row's sum.

    The mass is -inf for a block that is not visible or has no mass, and NaN in the whole row if one
    visible block has NaN.

    Args:
        sums_ptr: Of the stage `estimate`.
        first_valid_ptr: Layout.first_valid.
        b: Sequence.
        row_ptr_offset: int64 (head * Nq + query block) * Nkv.
        q_last: Position of the row's last query.
        Nkv: Key blocks.
        BLOCK_KV: Keys per block.
        N: Nkv padded to a power of two.
    """
    blk = tl.arange(0, N)
    visible = first_keys(first_valid_ptr, b, blk, Nkv, BLOCK_KV) <= q_last
    logs = tl.load(sums_ptr + row_ptr_offset + blk, mask=visible, other=float("-inf"))
    top = tl.max(logs, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(logs - base), 0)
    # 0 / 0 and Inf / Inf are NaN, and so is a row in which a NaN stands
    log2_total = base + tl.log2(total)
    return blk, visible, logs - log2_total, log2_total


@triton.jit
def left_out(slot, LEFT_OUT: tl.constexpr):
    """The share that candidate slot leaves out; -1 for the slot behind them, which keeps all."""
    share = tl.full([], -1.0, tl.float32)
    for i in tl.static_range(len(LEFT_OUT)):
        share = tl.where(slot == i, LEFT_OUT[i], share)
    return share


@triton.jit
def level_of(logs, share):
    """Level up to which a row drops blocks: the highest one below which at most share lies.

    logs [N] of row_masses. Blocks with `~(logs <= level)` are kept: all of a row of NaN, and all
    where share is below 0, whose level is NaN.
    """
    mass = tl.exp2(logs)
    low = tl.full([], _LOWEST, tl.float32)
    high = tl.full([], 0.0, tl.float32)
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        fits = tl.sum(tl.where(logs <= middle, mass, 0.0), 0) <= share
        low = tl.where(fits, middle, low)
        high = tl.where(fits, high, middle)
    return tl.where(share < 0, float("nan"), low)


@triton.jit
def always_kept(blk, q_first, q_last, first_block, last_block, BLOCK_Q: tl.constexpr,
                BLOCK_KV: tl.constexpr):  # fmt: skip
    """Which blocks every row keeps: lines.always, visible or not."""
    hi = (q_first + (BLOCK_Q - 1)) // BLOCK_KV
    lo = (q_first + 1) // BLOCK_KV - 1
    recent = (blk >= lo - (WINDOW - 1) // BLOCK_KV) & (blk <= hi)
    return recent | (blk == first_block) | (blk == last_block)
