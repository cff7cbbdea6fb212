"""Lengths, key mask and row sets of one call, on the host for launchers and inside kernels.

The kernels' twin of geometry.Geometry, without any [Nq, Nkv] tensor. Positions are int32; whatever
is multiplied by a stride is widened to int64 first by its user.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from crisp_flex.routing.geometry import WINDOW_TOKENS, valid_range
from crisp_flex.routing.params import RouteParams

WINDOW = tl.constexpr(WINDOW_TOKENS)


@dataclass(frozen=True, slots=True)
class Layout:
    """What every launcher needs to know of a call."""

    B: int
    Hq: int
    Hkv: int
    Lq: int
    Lkv: int
    D: int
    block_q: int
    block_kv: int
    # [B, Lkv] bool and, per sequence, [B, 2] int32 start and end of the valid keys; None without.
    key_valid: Tensor | None
    bounds: Tensor | None
    # [B, Nkv] int32 first valid key of a block (Lkv if none) and int8 whether all its keys are.
    first_valid: Tensor | None
    all_valid: Tensor | None

    @classmethod
    def of(
        cls, query: Tensor, key: Tensor, key_valid: Tensor | None, params: RouteParams
    ) -> Layout:
        """The layout of routing query [B, Hq, Lq, D] over key [B, Hkv, Lkv, D]."""
        B, Hq, Lq, D = query.shape
        Hkv, Lkv = key.shape[1:3]
        bounds = first_valid = all_valid = None
        if key_valid is not None:
            key_valid = key_valid.contiguous()
            bounds = torch.stack(valid_range(key_valid, Lkv, device=key.device), -1).int()
            first_valid, all_valid = _block_validity(key_valid, params.block_kv)
        return cls(
            B=B,
            Hq=Hq,
            Hkv=Hkv,
            Lq=Lq,
            Lkv=Lkv,
            D=D,
            block_q=params.block_q,
            block_kv=params.block_kv,
            key_valid=key_valid,
            bounds=bounds,
            first_valid=first_valid,
            all_valid=all_valid,
        )

    @property
    def Nq(self) -> int:
        return -(-self.Lq // self.block_q)

    @property
    def Nkv(self) -> int:
        return -(-self.Lkv // self.block_kv)

    @property
    def G(self) -> int:
        """Query heads per KV head."""
        return self.Hq // self.Hkv

    @property
    def BLOCK_D(self) -> int:
        """D padded to a power of two, at least what tl.dot takes."""
        return max(int(triton.next_power_of_2(self.D)), 16)

    @property
    def slash_bins(self) -> int:
        """Distance bins that touch one block, at most."""
        return (self.block_q + self.block_kv - 3) // self.block_kv + 2

    @property
    def phases(self) -> int:
        """Query blocks after which the places of their rows within key blocks repeat."""
        return max(self.block_kv // self.block_q, 1)

    @property
    def proxy_is_last_audit(self) -> bool:
        """The proxy rows are known to be exactly the last query block."""
        aligned = self.Lq % WINDOW_TOKENS == 0 and self.block_q == WINDOW_TOKENS
        return self.key_valid is None and aligned

    @property
    def proxy_slots(self) -> int:
        """Query blocks that hold proxy rows, at most."""
        if self.proxy_is_last_audit:
            return 1
        return (WINDOW_TOKENS + self.block_q - 2) // self.block_q + 1

    @property
    def planes(self) -> int:
        """Distance bins that one key block meets from the proxy rows, at most."""
        rows = min(WINDOW_TOKENS, self.Lq)
        aligned = self.key_valid is None and (self.Lkv - rows) % self.block_kv == 0
        # distances from the block's own bin on: -(block_kv - 1) .. farthest
        farthest = rows - 1 + (0 if aligned else self.block_kv - 1)
        return farthest // self.block_kv + 2


def _block_validity(key_valid: Tensor, block_kv: int) -> tuple[Tensor, Tensor]:
    """Layout.first_valid and Layout.all_valid of key_valid [B, Lkv]."""
    B, Lkv = key_valid.shape
    Nkv = -(-Lkv // block_kv)
    tail = Nkv * block_kv - Lkv
    tokens = torch.arange(Lkv, device=key_valid.device, dtype=torch.int32)
    first = torch.where(key_valid, tokens, Lkv)
    first = torch.nn.functional.pad(first, (0, tail), value=Lkv).view(B, Nkv, block_kv)
    full = torch.nn.functional.pad(key_valid, (0, tail), value=True).view(B, Nkv, block_kv)
    return first.amin(-1), full.all(-1).to(torch.int8)


@triton.jit
def bounds_of(bounds_ptr, b, Lkv):
    """Start and end of the valid keys of sequence b; start = Lkv and end = 0 if there are none."""
    if bounds_ptr is not None:
        start = tl.load(bounds_ptr + 2 * b)
        end = tl.load(bounds_ptr + 2 * b + 1)
    else:
        start = tl.full([], 0, tl.int32)
        end = tl.full([], 0, tl.int32) + Lkv
    return start, end


@triton.jit
def audit_block(start, end, offset, Nq, step, count, BLOCK_Q: tl.constexpr):
    """Query block audited at step 0 .. count - 1, as in Geometry.audit_blocks."""
    first = tl.maximum(start, offset)
    queries = tl.maximum(end - first, 0)
    tokens = (queries * (step + 1) + (count - 1)) // count
    block = tl.maximum(first - offset + tokens - 1, 0) // BLOCK_Q
    return tl.minimum(block, Nq - 1)


@triton.jit
def audit_range(start, end, offset, Nq, step, count, BLOCK_Q: tl.constexpr):
    """Position of the first row of an audit block, and the range [lo, hi) of rows that count."""
    block = audit_block(start, end, offset, Nq, step, count, BLOCK_Q)
    return block * BLOCK_Q + offset, start, end


@triton.jit
def proxy_range(start, end, offset, Lq):
    """Position of the first proxy row, and the range [lo, hi) of rows that count."""
    lo = tl.maximum(tl.maximum(end - WINDOW, start), offset)
    return end - tl.minimum(Lq, WINDOW), lo, end


@triton.jit
def key_blocks_seen(first, lo, hi, ROWS: tl.constexpr, BLOCK_KV: tl.constexpr):
    """Key blocks up to the last one that a counting row among ROWS from first on sees."""
    last = tl.minimum(first + ROWS, hi) - 1
    return tl.where(last >= tl.maximum(first, lo), tl.maximum(last, 0) // BLOCK_KV + 1, 0)


@triton.jit
def own_bin(first, ROWS: tl.constexpr, BLOCK_KV: tl.constexpr):
    """first // block_kv rounded down, for first >= -ROWS: the key block in which first lies."""
    shift = (ROWS + BLOCK_KV - 1) // BLOCK_KV
    return (first + shift * BLOCK_KV) // BLOCK_KV - shift


@triton.jit
def first_keys(first_valid_ptr, b, blk, Nkv, BLOCK_KV: tl.constexpr):
    """First valid key of key blocks blk, past every position if there is none."""
    if first_valid_ptr is not None:
        row_ptr = first_valid_ptr + b.to(tl.int64) * Nkv
        key = tl.load(row_ptr + blk, mask=blk < Nkv, other=2147483647)
    else:
        key = tl.where(blk < Nkv, blk * BLOCK_KV, 2147483647)
    return key


@triton.jit
def row_extent(
    first_valid_ptr, b, q_last, limit, Nkv, BLOCK_KV: tl.constexpr, BLOCK_J: tl.constexpr
):
    """Last visible key block (-1: none) and number of visible ones of rows q_last [R] int32.

    Blocks from limit on are visible to none of the rows.
    """
    if first_valid_ptr is not None:
        last = tl.zeros_like(q_last) - 1
        count = tl.zeros_like(q_last)
        for j in range(0, limit, BLOCK_J):
            blk = j + tl.arange(0, BLOCK_J)
            keys = first_keys(first_valid_ptr, b, blk, Nkv, BLOCK_KV)
            visible = keys[None, :] <= q_last[:, None]  # [R, BLOCK_J]
            last = tl.maximum(last, tl.max(tl.where(visible, blk[None, :], -1), 1))
            count += tl.sum(visible.to(tl.int32), 1)
    else:
        last = q_last // BLOCK_KV
        count = last + 1
    return last, count
