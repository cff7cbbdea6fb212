"""fp32 attention of some query blocks, over all keys or the kept ones: what results are held to."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

# Tokens per query block.
BLOCK = 128
# Relative error of a result in half precision against fp32, over sampled query blocks.
MOST_ERROR = 3e-3


def sampled_rows(L: int) -> list[int]:
    """The query blocks to check of L tokens: the first, the last, and two between."""
    N = -(-L // BLOCK)
    return sorted({0, N // 3, N // 2, N - 1})


def wanted_rows(
    q: Tensor, k: Tensor, v: Tensor, rows: Iterable[int], block_mask: BlockMask | None = None
) -> dict[int, Tensor]:
    """fp32 causal attention of query blocks `rows`, over the lists of block_mask or all keys.

    Args:
        q: [1, Hq, L, D].
        k: [1, Hkv, L, D].
        v: [1, Hkv, L, D].
        rows: Query blocks of BLOCK tokens.
        block_mask: Lists with query blocks of BLOCK tokens; None is all causal keys.

    Returns:
        {row: [Hq, tokens, D] fp32}.
    """
    L, D, G = q.shape[2], q.shape[3], q.shape[1] // k.shape[1]
    position = torch.arange(L, device=q.device)
    return {
        row: torch.stack(
            [
                _attend(
                    q[0, head, row * BLOCK : (row + 1) * BLOCK].float(),
                    k[0, head // G],
                    v[0, head // G],
                    position[row * BLOCK : (row + 1) * BLOCK],
                    _keys(block_mask, head, row, L, q.device),
                    D**-0.5,
                )
                for head in range(q.shape[1])
            ]
        )
        for row in rows
    }


def relative_error(out: Tensor, wanted: dict[int, Tensor], rows: Iterable[int]) -> float:
    """|| out - wanted || / || wanted || over the query blocks `rows` of out [1, Hq, L, D]."""
    difference = norm = 0.0
    for row in rows:
        got = out[0, :, row * BLOCK : (row + 1) * BLOCK].float()
        difference += (got - wanted[row]).double().square().sum().item()
        norm += wanted[row].double().square().sum().item()
    return float((difference / norm) ** 0.5)


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, positions: Tensor, chosen: Tensor, scale: float
) -> Tensor:
    logits = queries @ keys[chosen].float().T * scale
    logits.masked_fill_(chosen > positions[:, None], float("-inf"))
    return logits.softmax(-1) @ values[chosen].float()


def _keys(
    block_mask: BlockMask | None, head: int, row: int, L: int, device: torch.device
) -> Tensor:
    """int64 positions of the keys in the blocks that one query block lists."""
    end = min((row + 1) * BLOCK, L)
    if block_mask is None:
        return torch.arange(end, device=device)
    lists = []
    for counts, indices in (
        (block_mask.kv_num_blocks, block_mask.kv_indices),
        (block_mask.full_kv_num_blocks, block_mask.full_kv_indices),
    ):
        if counts is not None and indices is not None:
            lists.append(indices[0, head, row, : counts[0, head, row]])
    blocks, block_kv = torch.cat(lists).long(), block_mask.BLOCK_SIZE[1]
    keys = (blocks[:, None] * block_kv + torch.arange(block_kv, device=device)).flatten()
    return keys[keys < L]
