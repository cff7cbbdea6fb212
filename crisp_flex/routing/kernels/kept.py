"""Which blocks a row keeps under a policy without an audit, for the stages that need to know.

Oracle: policies.crisp, policies.streaming and policies.dense, before the guards.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from crisp_flex.routing.guards import ROUTE_ESTIMATE
from crisp_flex.routing.kernels.crisp_estimate import threshold
from crisp_flex.routing.kernels.crisp_map import map_logits
from crisp_flex.routing.kernels.positions import WINDOW

_ESTIMATE = tl.constexpr(ROUTE_ESTIMATE)


@dataclass(frozen=True, slots=True)
class Rule:
    """What a policy without an audit goes by; the tensors are crisp's.

    Attributes:
        recent_blocks: Last visible blocks that each row keeps.
        small_row_blocks: A row that sees fewer blocks keeps them all.
        route: [B, Hq] fp32; of crisp_router.
        verticals, slashes: Of crisp_lines.LineCover.
        mean_query, mean_key: Of pool.
        row_log2, above, gamma, octaves: Of crisp_estimate.Estimate.
        exponent: Factor on the pooled logits, in units of log2.
    """

    recent_blocks: int
    small_row_blocks: int = 0
    route: Tensor | None = None
    verticals: Tensor | None = None
    slashes: Tensor | None = None
    mean_query: Tensor | None = None
    mean_key: Tensor | None = None
    row_log2: Tensor | None = None
    above: Tensor | None = None
    gamma: float = 0.0
    octaves: float = 0.0
    exponent: float = 0.0

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """In the order in which the kernels take them."""
        return (
            self.route, self.verticals, self.slashes, self.mean_query, self.mean_key,
            self.row_log2, self.above,
        )  # fmt: skip

    @property
    def numbers(self) -> tuple[float, float, float, int]:
        """In the order in which the kernels take them."""
        return self.exponent, self.gamma, self.octaves, self.recent_blocks


@triton.jit
def lowest_entry(route_ptr, above_ptr, heads, bh, tiles, gamma, octaves, LEVELS: tl.constexpr):
    """log2 of the entry of the pooled map above which head bh keeps blocks; inf if it keeps none.

    heads is B * Hq, tiles the row tiles of stage `estimate`.
    """
    low = tl.full([], float("inf"), tl.float32)
    if route_ptr is not None:  # noqa: SIM102 (this one is decided at compile time)
        if tl.load(route_ptr + bh) == _ESTIMATE:
            low, _ = threshold(above_ptr, heads, bh, tiles, gamma, octaves, LEVELS)
    return low


@triton.jit
def kept_blocks(
    route_ptr,
    verticals_ptr,
    slashes_ptr,
    mean_q_ptr,
    mean_k_ptr,
    row_log2_ptr,
    exponent,
    recent_blocks,
    low,
    bh,
    kv_head,
    row,
    blk,
    visible,
    offset,
    first_block,
    last_block,
    count,
    Nq,
    Nkv,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    PHASES: tl.constexpr,
    SMALL: tl.constexpr,
):
    """[M, N] bool: what rows row [M] of head bh keep of blocks blk [N], visible or not.

    low comes from lowest_entry; bh and kv_head are int64, batch and head in one; visible [M, N] is
    False at least for rows and blocks that do not exist; last_block and count [M] are those of
    layout.row_extent.
    """
    q_first = (row * BLOCK_Q + offset)[:, None]
    hi = (q_first + (BLOCK_Q - 1)) // BLOCK_KV
    lo = (q_first + 1) // BLOCK_KV - 1
    block = blk[None, :]
    # the diagonals that distances below 128 tokens touch
    keep = (block >= lo - (WINDOW - 1) // BLOCK_KV) & (block <= hi)
    keep = keep | (block > (last_block - recent_blocks)[:, None]) | (block == first_block)
    if SMALL > 0:
        keep = keep | (count < SMALL)[:, None]
    if route_ptr is not None:
        if tl.load(route_ptr + bh) == _ESTIMATE:
            logits = map_logits(
                mean_q_ptr + bh * Nq * D, mean_k_ptr + kv_head * Nkv * D, row, blk, Nq, Nkv,
                exponent, D, BLOCK_D,
            )  # fmt: skip
            there = (row >= 0) & (row < Nq)
            row_log2 = tl.load(row_log2_ptr + bh * Nq + row, mask=there, other=float("inf"))
            # so put that a row of NaN keeps all it sees
            keep = keep | ~(logits - row_log2[:, None] <= low)
        else:
            vertical = tl.load(verticals_ptr + bh * Nkv + blk, mask=blk < Nkv, other=0) != 0
            row_ptrs = slashes_ptr + (bh * PHASES + row % PHASES)[:, None] * (Nkv + 2)
            slash = tl.load(row_ptrs + (hi - block), mask=visible, other=0) != 0
            keep = keep | vertical[None, :] | slash
    return keep
