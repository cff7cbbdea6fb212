"""The dense last blocks as a call of their own: the op, and the graph and the API that use it."""

import pytest
import torch
import torch.nn.functional as F

import crisp_flex
from crisp_flex import CrispConfig, last_rows
from tests.routing.inputs import structured

SHAPES = {
    "prompt": (300, 300, 1),
    "chunk": (200, 333, 1),
    "two blocks": (300, 300, 2),
    "more blocks than there are": (100, 100, 3),
}


def dense(query, key, value):
    Lq, Lkv = query.shape[2], key.shape[2]
    visible = torch.ones(Lq, Lkv, dtype=torch.bool).tril(Lkv - Lq)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=visible, enable_gqa=True)


@pytest.mark.parametrize("name", SHAPES)
def test_last_blocks_are_dense_and_the_rest_is_left(name):
    Lq, Lkv, blocks = SHAPES[name]
    query, key = structured(2, 6, 2, Lq, Lkv, 32)
    value = torch.randn_like(key)
    out = torch.full_like(query, 7.0)
    torch.ops.crisp_flex.write_last_rows(out, query, key, value, 32**-0.5, 64, blocks)
    first = max(-(-Lq // 64) - blocks, 0) * 64
    assert first == last_rows.first_token(Lq, 64, blocks)
    assert (out[:, :, :first] == 7).all()
    want = dense(query, key, value)[:, :, first:]
    assert torch.allclose(out[:, :, first:], want, atol=1e-5)


def test_op_is_registered_right():
    query, key = structured(1, 2, 1, 100, 100, 16)
    args = (torch.empty_like(query), query, key, torch.randn_like(key), 0.25, 64, 1)
    torch.library.opcheck(torch.ops.crisp_flex.write_last_rows.default, args)


@pytest.fixture
def apart_on_the_cpu(monkeypatch):
    def are_apart(query, key, value, config):
        return config.policy != "dense" and config.dense_last_blocks > 0

    monkeypatch.setattr(last_rows, "are_apart", are_apart)


def test_library_call_gives_the_same_either_way(monkeypatch):
    query, key = structured(1, 4, 2, 700, 700, 32)
    value = torch.randn_like(key)
    config = CrispConfig(min_seqlen=1, coverage=0.6, block_size=(64, 64), dense_last_blocks=2)
    want = crisp_flex.sparse_attention(query, key, value, config=config)
    monkeypatch.setattr(last_rows, "are_apart", lambda *args: True)
    got = crisp_flex.sparse_attention(query, key, value, config=config)
    assert torch.allclose(got, want, atol=1e-5)
    exact = dense(query, key, value)
    assert torch.allclose(got[:, :, 576:], exact[:, :, 576:], atol=1e-5)
    assert not torch.allclose(got[:, :, :576], exact[:, :, :576], atol=1e-3)


def test_graph_writes_them_behind_the_sparse_call(apart_on_the_cpu):
    class Model(torch.nn.Module):
        def forward(self, query, key, value):
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            return out.transpose(1, 2).flatten(2) * 2

    query, key = structured(1, 4, 2, 700, 700, 32)
    value = torch.randn_like(key)
    config = CrispConfig(min_seqlen=1, coverage=0.6, block_size=(64, 64))
    model = Model()
    want = dense(query, key, value).transpose(1, 2).flatten(2) * 2
    crisp_flex.compile(model, config)
    with torch.no_grad():
        got = model(query, key, value)
    assert torch.allclose(got[:, 640:], want[:, 640:], atol=1e-4)
    assert not torch.allclose(got[:, :640], want[:, :640], atol=1e-3)
    (report,) = crisp_flex.reports(model)
    assert len(report.rewritten) == 1
