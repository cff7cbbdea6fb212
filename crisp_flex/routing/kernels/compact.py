"""Stages `guards` and `compact` on the GPU, as far as all policies share them: rows into lists.

Oracle: guards.finish_rows and reference.compact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from crisp_flex.routing.geometry import partial_slots
from crisp_flex.routing.kernels.layout import Layout


@dataclass(frozen=True, slots=True)
class Lists:
    """Both lists of each row, in one buffer.

    Attributes:
        counts: [B, Hq, Nq] int32, partial blocks.
        buffer: [B, Hq, Nq, P + Nkv] int32; partial list from slot 0, full list from slot P, 0
            elsewhere.
        full_counts: [B, Hq, Nq] int32, full blocks.
        P: Slots of the partial list.
    """

    counts: Tensor
    buffer: Tensor
    full_counts: Tensor
    P: int

    @classmethod
    def empty(cls, layout: Layout, device: torch.device) -> Lists:
        """Lists to be filled by a kernel; the counts are undefined."""
        x = layout
        masked, moved = x.key_valid is not None, x.q_offset is not None
        P = partial_slots(x.block_q, x.block_kv, x.Lq, x.Lkv, masked, moved)
        counts, full_counts = (
            torch.empty((x.B, x.Hq, x.Nq), dtype=torch.int32, device=device) for _ in range(2)
        )
        # zeros, not empty: what a consumer must not rely on is at least the same on every run
        return cls(counts, counts.new_zeros((x.B, x.Hq, x.Nq, P + x.Nkv)), full_counts, P)


@triton.jit
def dense_rows(row, dense_last_blocks, end, offset, BLOCK_Q: tl.constexpr):
    """Which query blocks are among the last dense_last_blocks up to the last valid query."""
    last_row = tl.where(end > offset, (end - 1 - offset) // BLOCK_Q, -1)
    return (row > last_row - dense_last_blocks) & (row <= last_row)


@triton.jit
def append_blocks(
    keep, blk, q_first, row_ptrs, partials, fulls, all_valid_ptr, b, Lkv, Nkv, P,
    BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """Append the kept ones of key blocks blk [N] to the lists of M rows.

    Args:
        keep: [M, N], not True where a block is not visible.
        blk: [N] ascending, behind all that was appended before.
        q_first: [M] position of the first query of a row.
        row_ptrs: [M, 1] slot 0 of a row.
        partials: [M] int32 blocks in the partial list so far.
        fulls: [M] int32 blocks in the full list so far.
        all_valid_ptr: Layout.all_valid.
        b: Sequence.
        Lkv: Keys.
        Nkv: Key blocks.
        P: Slots of the partial list.
        BLOCK_KV: Keys per block.

    Returns:
        partials and fulls with these blocks.
    """
    full = (tl.minimum(blk * BLOCK_KV + (BLOCK_KV - 1), Lkv - 1))[None, :] <= q_first[:, None]
    if all_valid_ptr is not None:
        whole = tl.load(all_valid_ptr + b * Nkv + blk, mask=blk < Nkv, other=0) != 0
        full = full & whole[None, :]
    # ascending: the rank of a block is the number of kept ones before it, of its own kind; both
    # numbers in one scan, the partial ones in the upper half
    ones = tl.where(keep, tl.where(full, 1, 1 << 16), 0)
    ranks = tl.cumsum(ones, 1)
    full_slot = P - 1 + fulls[:, None] + (ranks & 0xFFFF)
    slot = tl.where(full, full_slot, partials[:, None] - 1 + (ranks >> 16))
    blocks = blk[None, :] + tl.zeros(keep.shape, tl.int32)
    tl.store(row_ptrs + slot, blocks, mask=keep)
    kept = tl.sum(ones, 1)
    return partials + (kept >> 16), fulls + (kept & 0xFFFF)
