"""Through Inductor on the CPU: chunks, caches longer than their filling, sliding windows."""

import pytest
import torch
import torch.nn.functional as F
from graphs import capture, large_masks, repeat_kv
from masked_attention import masked_attention, relative_error
from routed_blocks import routed_blocks

from crisp_flex import CrispConfig, CrispFlexBackend, Reason
from crisp_flex.passes.pipeline import run_passes

SPARSE = CrispConfig(
    min_seqlen=128,
    policy="streaming",
    streaming_blocks=1,
    dense_last_blocks=0,
    max_uncovered=1.0,
    block_size=(64, 64),
)


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


def chunk(q, k, v, past, attention_mask=None, window=None):
    """SDPA as transformers writes a later chunk: query i stands at past + i, keys from 0 on."""
    B, _, Lq, _ = q.shape
    Lkv = k.shape[2]
    query = torch.arange(Lq)[None, None, :, None] + past
    key = torch.arange(Lkv)[None, None, None, :]
    mask = key <= query
    if window is not None:
        mask = mask & (key > query - window)
    if attention_mask is not None:
        batch = torch.arange(B)[:, None, None, None]
        padded = F.pad(attention_mask.bool(), (0, Lkv - attention_mask.shape[1]))
        mask = mask & padded[batch, key]
    mask = mask.expand(B, -1, Lq, Lkv)
    return F.scaled_dot_product_attention(q, *repeat_kv(q, k, v), attn_mask=mask)


def left_padded(L, first=100):
    mask = torch.ones(2, L, dtype=torch.int64)
    mask[0, :first] = 0
    return mask


def masks(backend):
    sites = [site for report in backend.reports.values() for site in report.rewritten]
    return [site.mask for site in sites]


@pytest.mark.parametrize("past", [64, 200], ids=["aligned", "ragged"])
def test_a_chunk_is_sparse_and_equals_the_masked_reference(past, qkv):
    q, k, v = qkv(Lq=300, Lkv=300 + past, D=32)
    backend = CrispFlexBackend(SPARSE)
    got = torch.compile(chunk, backend=backend, fullgraph=True)(q, k, v, past)
    assert masks(backend) == [f"causal + offset {past}"]
    keep = routed_blocks(q, k, SPARSE)
    assert relative_error(got, masked_attention(q, k, v, keep, (64, 64))) < 2e-6
    assert relative_error(got, chunk(q, k, v, past)) > 0.1


def test_chunks_of_many_lengths_take_one_graph(qkv):
    backend = CrispFlexBackend(SPARSE)
    fn = torch.compile(chunk, backend=backend, dynamic=True, fullgraph=True)
    for Lq, past in ((300, 64), (200, 333), (500, 2), (129, 1000)):
        q, k, v = qkv(Lq=Lq, Lkv=Lq + past, D=32)
        want = masked_attention(q, k, v, routed_blocks(q, k, SPARSE), (64, 64))
        assert relative_error(fn(q, k, v, past), want) < 2e-6, (Lq, past)
    (reading,) = masks(backend)
    assert reading.startswith("causal + offset s")
    q, k, v = qkv(Lq=70, Lkv=100, D=32)  # too short: a graph of its own
    assert relative_error(fn(q, k, v, 30), chunk(q, k, v, 30)) < 2e-6
    q, k, v = qkv(Lq=300, Lkv=364, D=32)
    assert relative_error(fn(q, k, v, 80), chunk(q, k, v, 80)) < 2e-6  # no chunk at the end
    rejected = [site for report in backend.reports.values() for site in report.rejected]
    assert [s.rejection.reason for s in rejected] == [Reason.TOO_SHORT, Reason.MASK_OFFSET]


def test_a_padded_chunk_never_reads_padded_keys(qkv):
    q, k, v = qkv(B=2, Lq=300, Lkv=500, D=32)
    valid = left_padded(500)
    backend = CrispFlexBackend(SPARSE)
    fn = torch.compile(chunk, backend=backend, dynamic=False)
    got = fn(q, k, v, 200, valid)
    assert masks(backend) == ["causal + offset 200 + padding"]
    keep = routed_blocks(q, k, SPARSE, valid.bool())
    want = masked_attention(q, k, v, keep, (64, 64), key_valid=valid.bool())
    assert relative_error(got, want) < 2e-6
    v[0, :, :100] = 1e4
    v[:, :, 201:] = 1e4  # the first query must not see these
    assert torch.equal(fn(q, k, v, 200, valid)[:, :, 0], got[:, :, 0])


@pytest.mark.parametrize("past", [0, 150])
@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
def test_the_unfilled_end_of_a_cache_is_cut_off(past, padded, qkv):
    filled = 300 + past
    q, k, v = qkv(B=2, Lq=300, Lkv=640, D=32)
    k[:, :, filled:] = v[:, :, filled:] = float("nan")
    valid = left_padded(filled) if padded else None
    backend = CrispFlexBackend(SPARSE)
    got = torch.compile(chunk, backend=backend, dynamic=False)(q, k, v, past, valid)
    assert len(masks(backend)) == 1
    k, v = k[:, :, :filled], v[:, :, :filled]
    key_valid = None if valid is None else valid.bool()
    keep = routed_blocks(q, k, SPARSE, key_valid)
    want = masked_attention(q, k, v, keep, (64, 64), key_valid=key_valid)
    assert relative_error(got, want) < 2e-6


@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
def test_a_position_in_a_tensor_is_read_where_the_mask_stands(padded, qkv):
    """As a static cache counts: the counter goes on before the layer attends."""

    def counted(q, k, v, counter, attention_mask=None):
        B, Lkv = q.shape[0], k.shape[2]
        query = torch.arange(q.shape[2])[None, None, :, None] + counter
        key = torch.arange(Lkv)[None, None, None, :]
        mask = key <= query
        if attention_mask is not None:
            batch = torch.arange(B)[:, None, None, None]
            padded = F.pad(attention_mask.bool(), (0, Lkv - attention_mask.shape[1]))
            mask = mask & padded[batch, key]
        counter.add_(q.shape[2])
        return F.scaled_dot_product_attention(q, *repeat_kv(q, k, v), attn_mask=mask)

    backend = CrispFlexBackend(SPARSE)
    fn = torch.compile(counted, backend=backend, dynamic=False)
    q, k, v = qkv(B=2, Lq=300, Lkv=640, D=32)
    for past in (150, 37):
        filled = past + 300
        valid = left_padded(filled, 30) if padded else None
        counter = torch.tensor(past)
        got = fn(q, k, v, counter, valid)
        assert counter.item() == filled
        keys, values = k[:, :, :filled], v[:, :, :filled]
        key_valid = None if valid is None else valid.bool()
        keep = routed_blocks(q, keys, SPARSE, key_valid)
        want = masked_attention(q, keys, values, keep, (64, 64), key_valid=key_valid)
        rows = slice(30 if padded else 0, None)
        assert relative_error(got[:, :, rows], want[:, :, rows]) < 2e-6, past
    assert len(masks(backend)) == (2 if padded else 1)  # the width of the mask is static here


@pytest.mark.parametrize(
    ("past", "padded"), [(0, False), (150, True)], ids=["prompt", "padded chunk"]
)
def test_a_window_equals_dense(past, padded, qkv):
    L, window = 300 + past, 60
    q, k, v = qkv(B=2, Lq=300, Lkv=L, D=32)
    valid = left_padded(L) if padded else None
    backend = CrispFlexBackend(SPARSE)
    fn = torch.compile(chunk, backend=backend, dynamic=False)
    got, want = (f(q, k, v, past, valid, window) for f in (fn, chunk))
    ((site,),) = (report.sites for report in backend.reports.values())
    assert (site.policy, site.rewritten) == ("window", True)
    rows = slice(max(100 - past, 0) if padded else 0, None)
    assert relative_error(got[:, :, rows], want[:, :, rows]) < 2e-6
    assert got.isfinite().all()


def test_packed_documents_equal_dense(qkv):
    """Through Inductor: here the lists count, not only the mask."""

    def packed(q, k, v, ids):
        tokens = torch.arange(ids.shape[1], device=ids.device)
        mask = (tokens <= tokens[:, None]) & (ids[:, None, :, None] == ids[:, None, None, :])
        return F.scaled_dot_product_attention(q, *repeat_kv(q, k, v), attn_mask=mask)

    q, k, v = qkv(B=2, Lq=300, D=32)
    tokens = torch.arange(300)
    ids = torch.stack([tokens // 70, tokens // 40 % 2])  # the second row's documents come back
    backend = CrispFlexBackend(SPARSE)
    got = torch.compile(packed, backend=backend, dynamic=False)(q, k, v, ids)
    ((site,),) = (report.sites for report in backend.reports.values())
    assert (site.policy, site.mask) == ("segments", "causal + documents")
    assert relative_error(got, packed(q, k, v, ids)) < 2e-6


def test_windows_of_many_lengths_take_one_graph_and_a_wide_one_is_none(qkv):
    backend = CrispFlexBackend(SPARSE)
    fn = torch.compile(chunk, backend=backend, dynamic=True, fullgraph=True)
    for Lq, past in ((300, 64), (200, 333), (500, 2)):
        q, k, v = qkv(Lq=Lq, Lkv=Lq + past, D=32)
        assert relative_error(fn(q, k, v, past, None, 100), chunk(q, k, v, past, None, 100)) < 2e-6
    (reading,) = masks(backend)
    assert " + window " in reading
    q, k, v = qkv(Lq=300, Lkv=364, D=32)
    fn(q, k, v, 64, None, 1000)
    policies = [site.policy for report in backend.reports.values() for site in report.sites]
    assert policies == ["window", "streaming"]


def test_layers_of_one_window_share_their_lists_and_no_mask_is_left(qkv):
    def layers(q, k, v, attention_mask):
        B, _, L, _ = q.shape
        key = torch.arange(L)
        mask = (key <= key[:, None]) & (key > key[:, None] - 50)
        batch = torch.arange(B)[:, None, None, None]
        mask = mask & attention_mask.bool()[batch, key[None, None, None]]
        k, v = repeat_kv(q, k, v)
        for _ in range(3):
            q = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return q

    gm = capture(layers, *qkv(B=2, Lq=300, D=32), left_padded(300))
    assert len(run_passes(gm, SPARSE).rewritten) == 3
    assert large_masks(gm, 300) == []
    window = torch.ops.crisp_flex.window.default
    assert len(gm.graph.find_nodes(op="call_function", target=window)) == 1
