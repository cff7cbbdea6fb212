"""Block classes and slot bounds against the elementwise mask."""

import numpy as np
import pytest
import torch

from crisp_flex.routing.geometry import Geometry, block_classes, partial_slots
from tests.routing.inputs import SHAPES, case, key_mask
from tests.routing.scene import mask_of

BLOCKS = [(128, 128), (64, 64), (128, 64), (64, 128), (32, 128), (256, 64)]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("mask", ["none", "left", "right", "holes", "all false in the first"])
@pytest.mark.parametrize(("Lq", "Lkv"), [(1, 1), (129, 129), (300, 300), (256, 511), (70, 500)])
def test_classes_equal_any_and_all_of_the_mask(block, mask, Lq, Lkv):
    key_valid = key_mask(mask, 2, Lkv)
    visible, full = block_classes(Lq, Lkv, *block, key_valid, device=torch.device("cpu"))
    for b in range(visible.shape[0]):
        valid = np.ones(Lkv, bool) if key_valid is None else key_valid[b].numpy()
        pairs = mask_of(Lq, Lkv, valid)
        for I in range(visible.shape[2]):
            for J in range(visible.shape[3]):
                rows = slice(I * block[0], (I + 1) * block[0])
                tile = pairs[rows, J * block[1] : (J + 1) * block[1]]
                assert visible[b, 0, I, J] == tile.any()
                assert full[b, 0, I, J] == tile.all()


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_partial_slots_is_the_largest_count_over_all_offsets(block):
    def most(offsets):
        counts = []
        for offset in offsets:
            visible, full = block_classes(
                640, 640 + offset, *block, None, device=torch.device("cpu")
            )
            counts.append((visible & ~full).sum(-1).max().item())
        return max(counts)

    assert partial_slots(*block, 640, 640, False) == most([0])
    assert partial_slots(*block, 640, 641, False) == most(range(1, 2 * max(block), 3))


def test_one_slot_is_enough_for_an_aligned_prefill():
    assert partial_slots(128, 128, 4096, 4096, False) == 1
    assert partial_slots(128, 128, 4096, 4097, False) == 2
    assert partial_slots(128, 128, 4096, 4096, True) == 32


@pytest.mark.parametrize("name", SHAPES)
def test_slash_bins_are_those_with_a_distance_in_the_grid_block(name):
    query, key, key_valid, p = case(name)
    g = Geometry.of(query, key, key_valid, p)
    lo, hi = g.slash_bins()
    for I in range(g.Nq):
        for J in range(g.Nkv):
            nearest = I * g.block_q + g.offset - (J + 1) * g.block_kv + 1
            farthest = (I + 1) * g.block_q - 1 + g.offset - J * g.block_kv
            assert lo[I] - J == nearest // g.block_kv
            assert hi[I] - J == farthest // g.block_kv


@pytest.mark.parametrize(
    ("Lq", "count", "blocks"),
    [(4096, 4, [7, 15, 23, 31]), (300, 4, [0, 1, 1, 2]), (129, 4, [0, 0, 0, 1]), (1, 3, [0, 0, 0])],
)
def test_audit_blocks_end_at_equal_parts_of_the_length(Lq, count, blocks):
    query, _, _, p = case("one token")
    x = query[:, :, :1].expand(-1, -1, Lq, -1)
    got, distinct = Geometry.of(x, x, None, p).audit_blocks(count)
    assert got[0].tolist() == blocks
    assert got[distinct].tolist() == sorted(set(blocks))
