"""Lengths, key mask and tile counts of one call, for the launchers; positions.py is the device's.

The kernels' twin of geometry.Geometry, without any [Nq, Nkv] tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from crisp_flex.routing.geometry import WINDOW_TOKENS, block_validity, valid_range
from crisp_flex.routing.params import RouteParams


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
    # [1] integer position of query 0 in a cache longer than its filling; None is Lkv - Lq.
    q_offset: Tensor | None = None

    @classmethod
    def of(
        cls,
        query: Tensor,
        key: Tensor,
        key_valid: Tensor | None,
        params: RouteParams,
        q_offset: Tensor | None = None,
    ) -> Layout:
        """The layout of routing query [B, Hq, Lq, D] over key [B, Hkv, Lkv, D]."""
        B, Hq, Lq, D = query.shape
        Hkv, Lkv = key.shape[1:3]
        bounds = first_valid = all_valid = None
        if key_valid is not None:
            if q_offset is not None:
                tokens = torch.arange(Lkv, device=key.device)
                key_valid = key_valid & (tokens < q_offset + Lq)
            key_valid = key_valid.contiguous()
            bounds = torch.stack(valid_range(key_valid, Lkv, device=key.device), -1).int()
            first_valid, whole = block_validity(key_valid, params.block_kv)
            all_valid = whole.to(torch.int8)
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
            q_offset=q_offset,
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
        known = self.key_valid is None and self.q_offset is None
        aligned = known and (self.Lkv - rows) % self.block_kv == 0
        # distances from the block's own bin on: -(block_kv - 1) .. farthest
        farthest = rows - 1 + (0 if aligned else self.block_kv - 1)
        return farthest // self.block_kv + 2
