"""Block lists become the maps they stand for."""

import pytest
import torch

from crisp_flex.block_lists import kept_blocks, visible_blocks

UNDEFINED = 2**30


def lists_of(kept, partial, P):
    """What the route op would return for two bool maps (B, Hq, Nq, Nkv)."""
    B, Hq, Nq, Nkv = kept.shape
    buffer = torch.full((B, Hq, Nq, P + Nkv), UNDEFINED, dtype=torch.int32)
    counts = []
    for blocks, first in ((kept & partial, 0), (kept & ~partial, P)):
        for row in torch.cartesian_prod(*map(torch.arange, (B, Hq, Nq))).tolist():
            index = blocks[tuple(row)].nonzero()[:, 0].int()
            buffer[tuple(row)][first : first + len(index)] = index
        counts.append(blocks.sum(-1, dtype=torch.int32))
    return counts[0], buffer, counts[1]


@pytest.mark.parametrize("P", [1, 2, 9])
def test_lists_become_the_map_they_stand_for(P):
    diagonal = torch.eye(9, dtype=torch.bool)
    kept = (torch.rand(1, 3, 9, 9) < 0.4).tril() | diagonal
    lists = lists_of(kept, diagonal.expand_as(kept), P)
    assert torch.equal(kept_blocks(*lists, Nkv=9), kept)


def test_all_partial_and_empty_rows_are_read_right():
    kept = torch.zeros(1, 1, 2, 5, dtype=torch.bool)
    kept[0, 0, 1] = True
    lists = lists_of(kept, torch.ones_like(kept), 5)
    assert torch.equal(kept_blocks(*lists, Nkv=5), kept)


@pytest.mark.parametrize(("Lq", "Lkv"), [(1, 1), (100, 100), (64, 200), (50, 333)])
def test_visible_blocks_are_those_of_the_causal_mask(Lq, Lkv):
    seen = torch.ones(Lq, Lkv, dtype=torch.bool).tril(Lkv - Lq)
    counts = [sum(bool(part.any()) for part in rows.split(16, 1)) for rows in seen.split(32)]
    assert visible_blocks(Lq, Lkv, (32, 16)) == counts
