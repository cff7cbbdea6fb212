"""crisp_flex::segments against the elementwise mask, and the operator's contract."""

import pytest
import torch
from masked_attention import listed

import crisp_flex.routing.segments  # noqa: F401  (registers the operator)
from tests.routing.inputs import key_mask
from tests.routing.test_window import BLOCKS, element_mask, tiles


def ids_of(kind, L):
    """[2, L] int64: what the second sequence has is not what the first has."""
    tokens = torch.arange(L)
    gen = torch.Generator().manual_seed(L)
    if kind == "documents":
        starts = torch.rand(2, L, generator=gen) < 4 / L
        return starts.cumsum(1)
    if kind == "chunks behind padding":
        return torch.stack([tokens // 100, (tokens - 37) // 100])
    if kind == "come back":
        return torch.stack([tokens // 64 % 2, tokens // 90 % 3])
    return torch.randint(-5, 5, (2, L), generator=gen) * 2**40


@pytest.mark.parametrize("kind", ["documents", "chunks behind padding", "come back", "random"])
@pytest.mark.parametrize("mask", ["none", "left", "holes"])
@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("Lq", "Lkv"), [(1, 1), (300, 300), (256, 511)])
@pytest.mark.parametrize("moved", [False, True], ids=["at the end", "moved"])
def test_the_lists_hold_what_is_visible_and_full_blocks_need_no_mask(
    kind, mask, block, window, Lq, Lkv, moved
):
    offset = (Lkv - Lq) // 2 if moved else Lkv - Lq
    key_valid, k_ids = key_mask(mask, 2, Lkv), ids_of(kind, Lkv)
    q_ids = k_ids[:, offset : offset + Lq]
    q, k = torch.empty(2, 4, Lq, 8), torch.empty(2, 2, Lkv, 8)
    at = torch.tensor([offset], dtype=torch.int32) if moved else None
    counts, buffer, full_counts = torch.ops.crisp_flex.segments(
        q, k, key_valid, q_ids, k_ids, window, *block, q_offset=at
    )
    C, Nkv = buffer.shape[3] // 2, -(-Lkv // block[1])
    partial = listed(counts, buffer[..., :C], Nkv)[:, 0]
    full = listed(full_counts, buffer[..., C:], Nkv)[:, 0]
    visible = element_mask(Lq, Lkv, offset, Lkv if window is None else window, key_valid)
    some, every = tiles(visible & (q_ids[:, :, None] == k_ids[:, None]), *block)
    assert not (partial & full).any()
    assert not (some & ~(partial | full)).any(), "a visible block is not listed"
    assert not (full & ~every).any(), "a full block has a hidden pair"
    if kind == "documents" and mask == "none" and window is None:
        assert torch.equal(partial | full, some)
        assert torch.equal(full[..., :-1], every[..., :-1])  # the last block may be short
    for row, count in ((buffer[..., :C], counts), (buffer[..., C:], full_counts)):
        later = torch.arange(C - 1) + 1 < count[..., None]
        assert (row.diff(dim=-1)[later] > 0).all(), "ids do not ascend"


def test_documents_leave_out_most_blocks():
    ids = (torch.arange(1024) // 128).expand(1, -1)
    q = torch.empty(1, 1, 1024, 8)
    counts, _, full = torch.ops.crisp_flex.segments(q, q, None, ids, ids, None, 64, 64)
    assert int(counts.sum()) == 16  # the diagonal
    assert int(full.sum()) == 8  # the first half of a document for its second half


@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
@pytest.mark.parametrize(("window", "moved"), [(None, False), (70, True)])
def test_the_operator_passes_opcheck(padded, window, moved):
    q, k = torch.randn(2, 6, 200, 32), torch.randn(2, 2, 300, 32)
    key_valid = torch.arange(300).expand(2, 300) >= 40 if padded else None
    k_ids = ids_of("documents", 300)
    at = torch.tensor([50]) if moved else None
    torch.library.opcheck(
        torch.ops.crisp_flex.segments.default,
        (q, k, key_valid, k_ids[:, 100:].contiguous(), k_ids, window, 64, 64),
        {"q_offset": at},
    )
