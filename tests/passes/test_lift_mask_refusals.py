"""lift_mask on masks it must not read: no exception, no false claim, the rest in `other`."""

import pytest
import torch
from mask_meaning import B, L, columns, read, rows
from torch import nn


def setitem(q, k):
    mask = columns(k) <= rows(q)
    mask[0, 5] = True
    return mask


def setitem_through_a_view(q, k):
    mask = columns(k) <= rows(q)
    mask[2].fill_(True)
    return mask


def setitem_on_positions(q, k):
    i = torch.arange(q.shape[2])
    mask_rows = i[:, None]
    i += 1
    return columns(k) <= mask_rows


def out_argument(q, k):
    i, j = torch.arange(q.shape[2]), torch.arange(k.shape[2])
    torch.add(i, 2, out=i)
    return j[None, :] <= i[:, None]


def masked_fill_on_the_side(q, k):
    mask = columns(k) <= rows(q)
    mask.logical_or_(columns(k) == 3)
    return mask


def inplace_functional(q, k):
    i = torch.arange(q.shape[2]) - 3
    nn.functional.relu(i, True)
    return columns(k) <= i[:, None]


NOT_READ = {
    "or": lambda q, k: (columns(k) <= rows(q)) | (columns(k) == 0),
    "or of two causal": lambda q, k: (columns(k) <= rows(q)) | (columns(k) <= rows(q) + 1),
    "xor": lambda q, k: (columns(k) <= rows(q)) ^ (columns(k) == 0),
    "where": lambda q, k: torch.where(columns(k) <= rows(q), True, columns(k) == 0),
    "not of and": lambda q, k: ~((columns(k) <= rows(q)) & (columns(k) > 2)),
    "without diagonal": lambda q, k: (columns(k) <= rows(q)) & (columns(k) != rows(q) - 1),
    "float positions": lambda q, k: columns(k).float() <= rows(q).float(),
    "int8 positions": lambda q, k: columns(k).to(torch.int8) <= rows(q).to(torch.int8),
    "float bound": lambda q, k: columns(k) <= rows(q) + 0.5,
    "strided": lambda q, k: (columns(k) <= torch.arange(2 * q.shape[2])[:, None])[::2],
    "flipped": lambda q, k: (columns(k) <= rows(q)).flip(1),
    "rolled": lambda q, k: (columns(k) <= rows(q)).roll(1, 0),
    "doubled": lambda q, k: 2 * columns(k) <= rows(q),
    "modulo": lambda q, k: (columns(k) <= rows(q)) & (rows(q) % 2 == 0),
    "two offsets": lambda q, k: (columns(k) <= rows(q)) & (columns(k) <= rows(q) + 2),
    "two windows": lambda q, k: (columns(k) > rows(q) - 4) & (columns(k) > rows(q) - 5),
    "zeros": lambda q, k: torch.zeros(q.shape[2], k.shape[2], dtype=torch.bool),
    "per head": lambda q, k: columns(k) <= rows(q) + torch.arange(4)[:, None, None],
    "late queries": lambda q, k: (columns(k) <= rows(q)) & (rows(q) >= 2),
    "wrapped index": lambda q, k: (columns(k) <= rows(q))[torch.arange(q.shape[2]) - 5],
    "wraps in int32": lambda q, k: columns(k).int() + (2**31 - 6) <= rows(q).int(),
    "sorted": lambda q, k: columns(k) < rows(q) - rows(q).sort(0, descending=True)[0],
    "reshaped": lambda q, k: (columns(k) <= rows(q)).reshape(2, -1).reshape(L, L).T.reshape(L, L),
    "setitem": setitem,
    "fill of a view": setitem_through_a_view,
    "positions changed": setitem_on_positions,
    "out argument": out_argument,
    "logical_or_": masked_fill_on_the_side,
    "inplace relu": inplace_functional,
}


@pytest.mark.parametrize("build", NOT_READ.values(), ids=NOT_READ)
def test_what_is_not_understood_is_other(build):
    spec = read(build)
    assert spec.other
    assert not spec.is_plain_causal
    assert "other" in spec.describe()


def test_packed_documents():
    def build(q, k, position):
        document = (torch.diff(position, prepend=position[:, :1] - 1, dim=-1) != 1).cumsum(-1)
        same = document[:, None, :, None] == document[:, None, None, :]
        return (columns(k) <= rows(q)) & same

    position = torch.cat([torch.arange(5), torch.arange(L - 5)])[None].expand(B, -1).contiguous()
    spec = read(build, position)
    assert spec.documents
    assert spec.causal
    assert not spec.is_plain_causal


@pytest.mark.parametrize("start", [0, 3])
def test_one_document_counted_from_arange_folds_away(start):
    def build(q, k):
        position = (torch.arange(q.shape[2]) + start)[None]
        document = (torch.diff(position, prepend=position[:, :1] - 1, dim=-1) != 1).cumsum(-1)
        same = document[:, None, :, None] == document[:, None, None, :]
        return (columns(k) <= rows(q)) & same

    assert read(build).is_plain_causal


def test_a_jump_in_positions_does_not_fold_away():
    def build(q, k):
        position = (2 * torch.arange(q.shape[2]))[None]
        document = (torch.diff(position, prepend=position[:, :1] - 1, dim=-1) != 1).cumsum(-1)
        same = document[:, None, :, None] == document[:, None, None, :]
        return (columns(k) <= rows(q)) & same

    assert not read(build).is_plain_causal


def test_chunked_attention():
    build = lambda q, k: (columns(k) <= rows(q)) & (columns(k) // 4 == rows(q) // 4)  # noqa: E731
    spec = read(build)
    assert spec.chunk
    assert spec.causal
    assert not spec.is_plain_causal


def test_causal_by_a_tensor_of_positions():
    spec = read(lambda q, k, position: columns(k) <= position[:, None], torch.arange(L))
    assert spec.by_position
    assert not spec.causal
    assert not spec.is_plain_causal


def test_a_vmap_over_an_unknown_op_is_not_read():
    def build(q, k):
        def allowed(i, j):
            return j <= i.bitwise_xor(1)

        inner = torch.vmap(allowed, in_dims=(None, 0))
        return torch.vmap(inner, in_dims=(0, None))(
            torch.arange(q.shape[2]), torch.arange(k.shape[2])
        )

    spec = read(build)
    assert spec.other
    assert spec.kv_limit is None


@pytest.mark.parametrize("valid", [torch.ones(B, 1, L, L).bool(), torch.ones(B, 1, 1, L).bool()])
def test_a_mask_that_is_an_input_is_other(valid):
    assert read(lambda q, k, mask: mask, valid).other


def test_a_long_chain_ends_as_other():
    def build(q, k):
        mask = columns(k) <= rows(q)
        late = columns(k) > 100
        for _ in range(101):
            mask = mask | late
        return mask

    assert read(build).other


def test_a_dim_that_is_a_symbol_is_refused_without_an_error():
    from crisp_flex import CrispConfig, Reason
    from crisp_flex.passes.pipeline import run_passes

    found = []

    def backend(gm, example_inputs):
        found.append(run_passes(gm, CrispConfig(min_seqlen=16, block_size=(16, 16))))
        return gm.forward

    dims = [-1]  # what a function finds outside of itself is a symbol in a dynamic graph

    def attend(q, k, v, position):
        counted = position.cumsum(dims[0])
        mask = columns(k) <= counted[:, None]
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    q = torch.randn(1, 2, 64, 16)
    position = torch.ones(64, dtype=torch.int64)
    compiled = torch.compile(attend, backend=backend, dynamic=True, fullgraph=True)
    with torch.no_grad():
        got = compiled(q, q, q, position)
        assert torch.equal(got, attend(q, q, q, position))
    assert [site.rejection.reason for site in found[0].rejected] == [Reason.MASK_UNREAD]
