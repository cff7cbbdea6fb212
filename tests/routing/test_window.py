"""crisp_flex::window and query_offset against the elementwise mask, and the operators' contract."""

import pytest
import torch
from masked_attention import listed

from crisp_flex.routing import window as window_ops
from tests.routing.inputs import key_mask

BLOCKS = [(128, 128), (64, 64), (128, 64), (64, 128)]


def element_mask(Lq, Lkv, offset, window, key_valid):
    position = torch.arange(Lq)[:, None] + offset
    keys = torch.arange(Lkv)
    mask = (keys <= position) & (keys > position - window)
    return mask[None] if key_valid is None else mask & key_valid[:, None]


def tiles(mask, block_q, block_kv):
    """[B, Nq, Nkv] bool any and all of mask [B, Lq, Lkv] per block; tokens beyond are not there."""
    some, every = [], []
    for rows in mask.split(block_q, 1):
        parts = rows.split(block_kv, 2)
        some.append(torch.stack([part.any(2).any(1) for part in parts], -1))
        every.append(torch.stack([part.all(2).all(1) for part in parts], -1))
    return torch.stack(some, 1), torch.stack(every, 1)


@pytest.mark.parametrize("mask", ["none", "left", "right", "holes", "all false in the first"])
@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("window", [1, 17, 128, 200, 5000])
@pytest.mark.parametrize(("Lq", "Lkv"), [(1, 1), (300, 300), (256, 511), (70, 500)])
@pytest.mark.parametrize("moved", [False, True], ids=["at the end", "moved"])
def test_the_lists_hold_what_is_visible_and_full_blocks_need_no_mask(
    mask, block, window, Lq, Lkv, moved
):
    offset = (Lkv - Lq) // 2 if moved else Lkv - Lq
    key_valid = key_mask(mask, 2, Lkv)
    q, k = torch.empty(2, 4, Lq, 8), torch.empty(2, 2, Lkv, 8)
    at = torch.tensor([offset], dtype=torch.int32) if moved else None
    counts, buffer, full_counts = torch.ops.crisp_flex.window(
        q, k, key_valid, window, *block, q_offset=at
    )
    C, Nkv = buffer.shape[3] // 2, -(-Lkv // block[1])
    partial = listed(counts, buffer[..., :C], Nkv)[:, 0]
    full = listed(full_counts, buffer[..., C:], Nkv)[:, 0]
    some, every = tiles(element_mask(Lq, Lkv, offset, window, key_valid), *block)
    assert not (partial & full).any()
    assert not (some & ~(partial | full)).any(), "a visible block is not listed"
    assert not (full & ~every).any(), "a full block has a hidden pair"
    if mask != "holes":
        assert not ((partial | full) & ~some).any(), "a block with nothing visible is listed"
    for b in range(counts.shape[0]):
        for I in range(counts.shape[2]):
            for row, count in ((buffer[b, 0, I, :C], counts), (buffer[b, 0, I, C:], full_counts)):
                ids = row[: count[b, 0, I]].tolist()
                assert ids == sorted(set(ids))


def test_a_short_window_is_short_on_a_gpu(monkeypatch):
    """The band, wherever it lies in the grid, fits the slots that CUDA gets."""
    band = {}
    for block_q, block_kv in BLOCKS:
        for window in (1, 100, 129, 256):
            slots = (window + block_q + block_kv - 3) // block_kv + 1
            for offset in range(0, 2 * block_kv, 7):
                q, k = torch.empty(1, 1, 640, 8), torch.empty(1, 1, 640 + offset, 8)
                counts, _, full = torch.ops.crisp_flex.window(q, k, None, window, block_q, block_kv)
                assert int((counts + full).max()) <= slots
                monkeypatch.setattr(window_ops, "slots", lambda *_, slots=slots: slots)
                short = torch.ops.crisp_flex.window(q, k, None, window, block_q, block_kv)
                monkeypatch.undo()
                assert short[1].shape[3] == 2 * slots
                assert torch.equal(short[0], counts)
                assert torch.equal(short[2], full)
                band[window] = slots
    assert band[1] < band[256]


@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
@pytest.mark.parametrize("moved", [False, True], ids=["at the end", "moved"])
def test_the_operators_pass_opcheck(padded, moved):
    q, k = torch.randn(2, 6, 200, 32), torch.randn(2, 2, 300, 32)
    key_valid = torch.arange(300).expand(2, 300) >= 40 if padded else None
    at = torch.tensor([50]) if moved else None
    torch.library.opcheck(
        torch.ops.crisp_flex.window.default, (q, k, key_valid, 70, 64, 64), {"q_offset": at}
    )
    torch.library.opcheck(torch.ops.crisp_flex.query_offset.default, (q, k))


def test_the_offset_of_the_queries():
    q, k = torch.empty(2, 6, 200, 32), torch.empty(2, 2, 300, 32)
    offset = torch.ops.crisp_flex.query_offset(q, k)
    assert (offset.tolist(), offset.dtype) == ([100], torch.int32)
