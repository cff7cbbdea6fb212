"""Which blocks can be seen at all: the valid range of each sequence and the classes of its blocks.

Everything here is arithmetic on lengths, block sizes and the key mask; no query or key is read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from crisp_flex.routing.params import RouteParams

# Tokens in the proxy, sink and recency windows, whatever the block size (CRISP, arXiv 2609.01925).
WINDOW_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Geometry:
    """Lengths, block classes and valid ranges of one call; B' below is B with a key mask, else 1.

    A query is valid if its position is in [start, end) of its sequence, holes included.
    """

    Lq: int
    Lkv: int
    block_q: int
    block_kv: int
    Nq: int
    Nkv: int
    # Position of query 0 among the keys; [1] int64 if it is only known when the graph runs.
    offset: int | Tensor
    # [B, Lkv] bool, or None if every key is there; [1, Lkv] if only the offset says which are.
    key_valid: Tensor | None
    # [B'] int64: first valid key, and one past the last; start > end if there is none.
    start: Tensor
    end: Tensor
    # [B', 1, Nq, Nkv] bool.
    visible: Tensor
    full: Tensor
    # [B', Nkv] bool: key blocks with a valid key.
    filled: Tensor
    # [B'] int64: key block of start.
    first_block: Tensor
    # [B', 1, Nq] int64: d(I), the last visible key block, -1 where nothing is visible.
    last_block: Tensor
    # [B', 1, Nq] int64: n(I), the number of visible key blocks.
    visible_blocks: Tensor
    # [B', Nq] bool: query blocks that hold a valid query.
    live: Tensor

    @classmethod
    def of(
        cls,
        query: Tensor,
        key: Tensor,
        key_valid: Tensor | None,
        params: RouteParams,
        q_offset: Tensor | None = None,
    ) -> Geometry:
        """The geometry of routing query [B, Hq, Lq, D] over key [B, Hkv, Lkv, D].

        q_offset: [1] integer position of query 0 among the keys, in [0, Lkv - Lq]; None is
            Lkv - Lq. Keys behind the last query are then seen by nobody.
        """
        Lq, Lkv = query.shape[2], key.shape[2]
        block_q, block_kv = params.block_q, params.block_kv
        Nq, Nkv = -(-Lq // block_q), -(-Lkv // block_kv)
        device = query.device
        offset: int | Tensor = Lkv - Lq
        if q_offset is not None:
            offset = q_offset.long()
            reached = torch.arange(Lkv, device=device)[None] < offset[:, None] + Lq
            key_valid = reached if key_valid is None else key_valid & reached
        visible, full = block_classes(
            Lq, Lkv, block_q, block_kv, key_valid, device=device, offset=offset
        )
        start, end = valid_range(key_valid, Lkv, device=device)
        blocks = torch.arange(Nkv, device=device)
        q_first = torch.arange(Nq, device=device) * block_q + offset
        q_last = (q_first + (block_q - 1)).clamp(max=offset + (Lq - 1))
        return cls(
            Lq=Lq,
            Lkv=Lkv,
            block_q=block_q,
            block_kv=block_kv,
            Nq=Nq,
            Nkv=Nkv,
            offset=offset,
            key_valid=key_valid,
            start=start,
            end=end,
            visible=visible,
            full=full,
            # the last query sees every key that is there
            filled=visible[:, 0, -1],
            first_block=(start // block_kv).clamp(max=Nkv - 1),
            last_block=torch.where(visible, blocks, -1).amax(-1),
            visible_blocks=visible.sum(-1),
            live=(q_last >= start[:, None]) & (q_first < end[:, None]),
        )

    def slash_bins(self) -> tuple[Tensor, Tensor]:
        """[Nq] int64 each, lo and hi: block (I, J) is touched by distance bins lo[I]-J .. hi[I]-J.

        Bin t holds the distances [block_kv * t, block_kv * (t + 1)). Equal block sizes: a bin
        touches the diagonals t and t + 1 if offset is a multiple of the block, else t - 1 as well.
        """
        q_first = torch.arange(self.Nq, device=self.start.device) * self.block_q + self.offset
        lo = (q_first + 1) // self.block_kv - 1
        hi = (q_first + (self.block_q - 1)) // self.block_kv
        return lo, hi

    def proxy_start(self) -> Tensor:
        """[B'] int64: position of the first proxy row, the last 128 valid queries of a sequence."""
        return (self.end - WINDOW_TOKENS).maximum(self.start).clamp(min=self.offset)

    def audit_blocks(self, count: int) -> tuple[Tensor, Tensor]:
        """The query blocks at 1/count, 2/count ... 1 of the valid queries of each sequence.

        Returns:
            blocks: [B', count] int64, ascending, in [0, Nq).
            distinct: [B', count] bool, False for repeats and for sequences with no valid query.
        """
        first = self.start.clamp(min=self.offset)
        queries = (self.end - first).clamp(min=0)[:, None]
        steps = torch.arange(1, count + 1, device=first.device)
        tokens = (queries * steps + (count - 1)) // count
        blocks = (first[:, None] - self.offset + tokens - 1) // self.block_q
        blocks = blocks.clamp(0, self.Nq - 1)
        distinct = torch.ones_like(blocks, dtype=torch.bool)
        distinct[:, 1:] = blocks[:, 1:] != blocks[:, :-1]
        return blocks, distinct & (queries > 0)


def valid_range(
    key_valid: Tensor | None, Lkv: int, *, device: torch.device
) -> tuple[Tensor, Tensor]:
    """First valid key and one past the last, [B] int64 each ([1] without a mask).

    A sequence without any valid key has start = Lkv and end = 0.
    """
    tokens = torch.arange(Lkv, device=device)
    if key_valid is None:
        return tokens[:1], tokens[-1:] + 1
    start = torch.where(key_valid, tokens, Lkv).amin(-1)
    end = torch.where(key_valid, tokens + 1, 0).amax(-1)
    return start, end


def block_classes(
    Lq: int,
    Lkv: int,
    block_q: int,
    block_kv: int,
    key_valid: Tensor | None,
    *,
    device: torch.device,
    offset: int | Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Which blocks hold a visible pair, and in which all pairs of existing tokens are visible.

    Query i sees key j if j <= i + offset and key_valid[b, j]. The ragged tail block of the keys
    may be full: the attention kernel masks what lies beyond Lkv itself.

    Args:
        Lq: Query tokens.
        Lkv: Key tokens, at least Lq.
        block_q: Query tokens per block.
        block_kv: Key tokens per block.
        key_valid: [B, Lkv] bool, or None if every key is valid.
        device: Where the result lies.
        offset: Position of query 0 among the keys, a number or [1] int64; None is Lkv - Lq.

    Returns:
        visible, full: [B, 1, Nq, Nkv] bool, B 1 without key_valid; full implies visible.
    """
    Nq, Nkv = -(-Lq // block_q), -(-Lkv // block_kv)
    offset = Lkv - Lq if offset is None else offset
    q_first = (torch.arange(Nq, device=device) * block_q + offset)[:, None]
    q_last = (q_first + (block_q - 1)).clamp(max=offset + (Lq - 1))
    k_first = (torch.arange(Nkv, device=device) * block_kv)[None]
    k_last = (k_first + (block_kv - 1)).clamp(max=Lkv - 1)
    if key_valid is None:
        return (k_first <= q_last)[None, None], (k_last <= q_first)[None, None]
    first_valid, all_valid = block_validity(key_valid, block_kv)
    visible = first_valid[:, None, None] <= q_last
    full = all_valid[:, None, None] & (k_last <= q_first)
    return visible, full


def block_validity(key_valid: Tensor, block_kv: int) -> tuple[Tensor, Tensor]:
    """First valid key of each key block, and whether all keys of it are valid.

    Args:
        key_valid: [B, Lkv] bool.
        block_kv: Key tokens per block; a short last block counts only the keys that it has.

    Returns:
        [B, Nkv] int32, Lkv where there is none; [B, Nkv] bool.
    """
    B, Lkv = key_valid.shape
    tail = -Lkv % block_kv
    blocked = (B, (Lkv + tail) // block_kv, block_kv)
    tokens = torch.arange(Lkv, device=key_valid.device, dtype=torch.int32)
    first = pad(torch.where(key_valid, tokens, Lkv), (0, tail), value=Lkv)
    whole = pad(key_valid, (0, tail), value=True)
    return first.view(blocked).amin(-1), whole.view(blocked).all(-1)


def partial_slots(
    block_q: int,
    block_kv: int,
    Lq: int,
    Lkv: int,
    has_key_valid: bool,
    has_q_offset: bool = False,
) -> int:
    """Slots that the partial list of a query block may need: a bound that holds for every offset.

    Without a key mask only blocks on the causal diagonal are partial, so the bound comes from the
    block sizes and from whether query 0 is known to stand at key 0 (Lq equals Lkv, one comparison,
    fine for symbolic lengths, and no q_offset). With a key mask every block may be partial.
    """
    if has_key_valid:
        return (Lkv + block_kv - 1) // block_kv
    if not has_q_offset and Lq == Lkv:
        # query blocks start at multiples of gcd within a key block
        return (block_q + block_kv - math.gcd(block_q, block_kv) - 1) // block_kv + 1
    # the tokens after the first of a query block, anywhere in the grid
    return max((block_q + block_kv - 3) // block_kv + 1, 1)


def take_rows(blocks_by_row: Tensor, rows: Tensor) -> Tensor:
    """[B, H, R, N] rows of [B or 1, H, Nq, N], for query blocks rows [B or 1, R] int64."""
    B = max(blocks_by_row.shape[0], rows.shape[0])
    H, _, N = blocks_by_row.shape[1:]
    index = rows[:, None, :, None].expand(B, H, -1, N)
    return blocks_by_row.expand(B, -1, -1, -1).gather(2, index)
