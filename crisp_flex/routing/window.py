"""The operators crisp_flex::window and crisp_flex::query_offset: lists that only lengths decide.

A site with a short sliding window keeps every block of its window: nothing is chosen, so nothing is
read but lengths and the key mask. Other than the lists of `crisp_flex::route` these have one head,
which FlexAttention broadcasts, and as many slots for partial blocks as for full ones.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from crisp_flex.routing.geometry import block_validity

WindowResult = tuple[Tensor, Tensor, Tensor]

torch.library.define(
    "crisp_flex::window",
    "(Tensor query, Tensor key, Tensor? key_valid, int window, int block_q, int block_kv, *, "
    "Tensor? q_offset=None) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
torch.library.define(
    "crisp_flex::query_offset",
    "(Tensor query, Tensor key) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@torch.library.impl("crisp_flex::window", ("cpu", "cuda"))
def window_lists(
    query: Tensor,
    key: Tensor,
    key_valid: Tensor | None,
    window: int,
    block_q: int,
    block_kv: int,
    *,
    q_offset: Tensor | None = None,
) -> WindowResult:
    """The blocks of a causal sliding window: query at p sees keys p - window + 1 .. p.

    Args:
        query: [B, Hq, Lq, D]; only its shape is read.
        key: [B, Hkv, Lkv, D], likewise.
        key_valid: [B, Lkv] bool, False where a key is padding; None if every key is valid.
        window: Keys that a query sees, itself among them, at least 1.
        block_q: Query tokens per block.
        block_kv: Key tokens per block.
        q_offset: [1] integer position of query 0; None is Lkv - Lq.

    Returns:
        kv_num_blocks: [B', 1, Nq] int32 with B' = B with a key mask, else 1: blocks that need the
            mask. One with a hole in its padding may hold nothing visible.
        kv_buffer: [B', 1, Nq, 2 C] int32: they ascend from slot 0, the full ones from slot C.
        full_kv_num_blocks: [B', 1, Nq] int32: blocks in which every pair is visible.
    """
    Lq, Lkv = query.shape[2], key.shape[2]
    Nkv = -(-Lkv // block_kv)
    C = slots(query, Nkv, window, block_q, block_kv)
    offset = Lkv - Lq if q_offset is None else q_offset.long()
    blocks, near, inside = causal_band(query.device, Lq, Lkv, offset, window, block_q, block_kv, C)
    if key_valid is None:
        visible, full = near[None], (near & inside)[None]
    else:
        first_valid, all_valid = block_validity(key_valid, block_kv)
        q_first, q_last = _rows(query.device, Lq, offset, block_q)
        at = blocks.clamp(max=Nkv - 1)
        visible = near & (first_valid[:, at] <= q_last)
        visible = visible & (_last_valid(key_valid, block_kv)[:, at] > q_first - window)
        full = visible & inside & all_valid[:, at]
    return list_blocks(visible, full, blocks, C)


def causal_band(
    device: torch.device,
    Lq: int,
    Lkv: int,
    offset: int | Tensor,
    window: int | None,
    block_q: int,
    block_kv: int,
    C: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """[Nq, n] each: ids of the n <= C blocks that a row may see; seen by position; wholly so."""
    Nkv = -(-Lkv // block_kv)
    q_first, q_last = _rows(device, Lq, offset, block_q)
    lowest = torch.zeros_like(q_first)
    if window is not None:
        lowest = (q_first - (window - 1)).clamp(min=0) // block_kv
    blocks = lowest + torch.arange(min(C, Nkv), device=device)
    first, last = blocks * block_kv, blocks * block_kv + (block_kv - 1)
    inside = last <= q_first
    if window is not None:
        inside = inside & (first > q_last - window)
    return blocks, (first <= q_last) & (blocks < Nkv), inside


def _rows(
    device: torch.device, Lq: int, offset: int | Tensor, block_q: int
) -> tuple[Tensor, Tensor]:
    """[Nq, 1] each: position of the first and of the last query of a block."""
    Nq = -(-Lq // block_q)
    q_first = (torch.arange(Nq, device=device) * block_q + offset)[:, None]
    return q_first, (q_first + (block_q - 1)).clamp(max=offset + (Lq - 1))


def list_blocks(visible: Tensor, full: Tensor, blocks: Tensor, C: int) -> WindowResult:
    """Ascending lists of what is visible [B', Nq, n], split by full, of ids blocks [Nq, n]."""
    B, Nq, _ = visible.shape
    buffer = torch.zeros(B, 1, Nq, 2 * C + 1, dtype=torch.int32, device=blocks.device)
    partial = visible & ~full
    slot = torch.where(full, C + full.cumsum(-1) - 1, 2 * C)  # the last slot is cut off
    slot = torch.where(partial, partial.cumsum(-1) - 1, slot)
    buffer.scatter_(-1, slot[:, None], blocks.int().expand(visible.shape)[:, None])
    return (
        partial.sum(-1, dtype=torch.int32)[:, None],
        buffer[..., : 2 * C].contiguous(),
        full.sum(-1, dtype=torch.int32)[:, None],
    )


def _last_valid(key_valid: Tensor, block_kv: int) -> Tensor:
    """[B, Nkv] int64: last valid key of a block, -1 if there is none."""
    Lkv = key_valid.shape[1]
    last = torch.where(key_valid, torch.arange(Lkv, device=key_valid.device), -1)
    last = pad(last, (0, -Lkv % block_kv), value=-1)
    return last.reshape(len(key_valid), -(-Lkv // block_kv), block_kv).amax(-1)


def slots(query: Tensor, Nkv: int, window: int | None, block_q: int, block_kv: int) -> int:
    """Slots of one list: all key blocks where the kernel demands it, else those of the window."""
    if window is None or query.device.type == "cpu":
        return Nkv
    # window + block_q - 1 tokens, anywhere in the grid
    return (window + block_q + block_kv - 3) // block_kv + 1


def fake_lists(
    query: Tensor, key: Tensor, B: int, window: int | None, block_q: int, block_kv: int
) -> WindowResult:
    """Empty lists of the shapes that the operators return."""
    Nq = (query.shape[2] + block_q - 1) // block_q
    Nkv = (key.shape[2] + block_kv - 1) // block_kv
    C = slots(query, Nkv, window, block_q, block_kv)
    counts = query.new_empty((B, 1, Nq), dtype=torch.int32)
    buffer = query.new_empty((B, 1, Nq, 2 * C), dtype=torch.int32)
    return counts, buffer, torch.empty_like(counts)


@torch.library.register_fake("crisp_flex::window")
def _window_fake(
    query: Tensor,
    key: Tensor,
    key_valid: Tensor | None,
    window: int,
    block_q: int,
    block_kv: int,
    *,
    q_offset: Tensor | None = None,
) -> WindowResult:
    B = 1 if key_valid is None else key_valid.shape[0]
    return fake_lists(query, key, B, window, block_q, block_kv)


@torch.library.impl("crisp_flex::query_offset", ("cpu", "cuda"))
def query_offset(query: Tensor, key: Tensor) -> Tensor:
    """[1] int32 Lkv - Lq: the position of query 0, for a mask_mod that a symbol would crash."""
    offset = key.shape[2] - query.shape[2]
    return torch.full((1,), offset, dtype=torch.int32, device=query.device)


@torch.library.register_fake("crisp_flex::query_offset")
def _query_offset_fake(query: Tensor, key: Tensor) -> Tensor:
    return query.new_empty((1,), dtype=torch.int32)
