"""The block lists of a route call, read as maps and counts on the device that they are on."""

from __future__ import annotations

import torch
from torch import Tensor


def kept_blocks(
    kv_num_blocks: Tensor, kv_indices: Tensor, full_kv_num_blocks: Tensor, Nkv: int
) -> Tensor:
    """The block lists of a route call as a bool map.

    Args:
        kv_num_blocks: (..., Nq) int32, lengths of the partial lists.
        kv_indices: (..., Nq, P + Nkv) int32, the partial list in the first P slots, the full list
            behind them; what is beyond a list's length is undefined.
        full_kv_num_blocks: (..., Nq) int32, lengths of the full lists.
        Nkv: Number of key blocks.

    Returns:
        (..., Nq, Nkv) bool, True where the block is in one of the lists.

    Example:
        >>> counts, full = torch.tensor([1, 1]), torch.tensor([0, 1])
        >>> kept_blocks(counts, torch.tensor([[0, 0, 0], [1, 0, 0]]), full, 2).int().tolist()
        [[1, 0], [1, 1]]
    """
    P = kv_indices.shape[-1] - Nkv
    # One column more than there are blocks: what is beyond a list's length goes there.
    kept = torch.zeros(*kv_indices.shape[:-1], Nkv + 1, dtype=torch.bool, device=kv_indices.device)
    for count, blocks in (
        (kv_num_blocks, kv_indices[..., :P]),
        (full_kv_num_blocks, kv_indices[..., P:]),
    ):
        listed = torch.arange(blocks.shape[-1], device=blocks.device) < count[..., None]
        kept.scatter_(-1, blocks.long().where(listed, Nkv), True)
    return kept[..., :Nkv]


def visible_blocks(Lq: int, Lkv: int, block_size: tuple[int, int]) -> list[int]:
    """Key blocks that the queries of each query block see in a causal call without padding.

    Args:
        Lq: Queries; query i sees the keys 0 .. i + Lkv - Lq.
        Lkv: Keys.
        block_size: (query, key) tokens.

    Returns:
        A number a query block.

    Example:
        >>> visible_blocks(300, 300, (128, 128))
        [1, 2, 3]
        >>> visible_blocks(256, 512, (128, 128))
        [3, 4]
    """
    block_q, block_kv = block_size
    ends = (min(first + block_q, Lq) for first in range(0, Lq, block_q))
    return [(end - 1 + Lkv - Lq) // block_kv + 1 for end in ends]
