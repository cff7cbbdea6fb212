"""Block lists become the maps they stand for, and the picture is written."""

import pytest
import torch

from crisp_flex.demo.picture import BlockRecorder, kept_blocks, save_picture
from crisp_flex.routing.params import STAT_NAMES

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


def stats_of(kept):
    B, Hq, Nq = kept.shape[:3]
    stats = torch.zeros(B, Hq, len(STAT_NAMES))
    stats[..., STAT_NAMES.index("kept_blocks")] = kept.sum((-1, -2)).float()
    stats[..., STAT_NAMES.index("visible_blocks")] = Nq * (Nq + 1) / 2
    return stats


def causal_maps(Hq, N, share):
    """Random causal maps (1, Hq, N, N) that keep the diagonal, and where they are partial."""
    diagonal = torch.eye(N, dtype=torch.bool)
    kept = (torch.rand(1, Hq, N, N) < share).tril() | diagonal
    return kept, diagonal.expand_as(kept)


@pytest.mark.parametrize("P", [1, 2, 9])
def test_lists_become_the_map_they_stand_for(P):
    kept, partial = causal_maps(3, 9, 0.4)
    assert torch.equal(kept_blocks(*lists_of(kept, partial, P), Nkv=9), kept)


def test_all_partial_and_empty_rows_are_read_right():
    kept = torch.zeros(1, 1, 2, 5, dtype=torch.bool)
    kept[0, 0, 1] = True
    lists = lists_of(kept, torch.ones_like(kept), 5)
    assert torch.equal(kept_blocks(*lists, Nkv=5), kept)


def test_recorder_counts_what_the_lists_hold():
    recorder = BlockRecorder(Nkv=9)
    maps = [causal_maps(5, 9, share) for share in (0.1, 0.6)]
    for call, (kept, partial) in enumerate(maps):
        recorder(call, *lists_of(kept, partial, 1), stats_of(kept))
    kept_by_layer = [int(kept.sum()) for kept, _ in maps]
    assert recorder.density_by_layer == pytest.approx([n / (5 * 45) for n in kept_by_layer])
    assert recorder.density == pytest.approx(sum(kept_by_layer) / (2 * 5 * 45))
    for layer, (kept, _) in zip(recorder.layers, maps, strict=True):
        assert torch.equal(layer.masks, kept[0, layer.heads])
        densities = layer.density[layer.heads].tolist()
        assert densities == sorted(densities)
        assert densities[0] == layer.density.min()
        assert densities[-1] == layer.density.max()


@pytest.mark.parametrize("layers", [1, 2, 30])
@pytest.mark.parametrize("Hq", [1, 2, 9])
def test_picture_is_a_png(tmp_path, layers, Hq):
    pytest.importorskip("matplotlib")
    recorder = BlockRecorder(Nkv=9)
    for call in range(layers):
        kept, partial = causal_maps(Hq, 9, 0.4)
        recorder(call, *lists_of(kept, partial, 1), stats_of(kept))
    file = tmp_path / "masks.png"
    save_picture(recorder, "synthetic", file)
    assert file.read_bytes().startswith(b"\x89PNG")
