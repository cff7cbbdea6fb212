"""Through Inductor on the CPU: all blocks kept equals dense, fewer equal a masked reference."""

import pytest
import torch
import torch.nn.functional as F
from graphs import causal, causal_mask, padded_mask
from masked_attention import masked_attention, relative_error
from routed_blocks import routed_blocks

import crisp_flex
from crisp_flex import CrispConfig, CrispFlexBackend, Reason

SPARSE = CrispConfig(
    min_seqlen=128, policy="streaming", streaming_blocks=1, dense_last_blocks=0, max_uncovered=1.0
)


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


def reasons(backend):
    sites = [site for report in backend.reports.values() for site in report.rejected]
    return [site.rejection.reason for site in sites]


@pytest.mark.parametrize("L", [512, 1000])
def test_all_blocks_kept_equals_dense(L, qkv):
    q, k, v = qkv(Hq=6, Hkv=2, Lq=L, D=32)
    backend = CrispFlexBackend(CrispConfig(min_seqlen=128, policy="dense"))
    got = torch.compile(causal, backend=backend, fullgraph=True)(q, k, v)
    assert [len(report.rewritten) for report in backend.reports.values()] == [1]
    torch.testing.assert_close(got, causal(q, k, v), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("L", [640, 1000])
def test_fewer_blocks_equal_the_masked_reference_and_differ_from_dense(L, qkv):
    q, k, v = qkv(Hq=6, Hkv=2, Lq=L, D=32)
    got = torch.compile(causal_mask, backend=CrispFlexBackend(SPARSE), fullgraph=True)(q, k, v)
    keep = routed_blocks(q, k, SPARSE)
    assert keep.sum() < keep.numel() * 0.5
    assert relative_error(got, masked_attention(q, k, v, keep)) < 2e-6
    assert relative_error(got, causal(q, k, v)) > 0.1


def test_left_padding_never_reads_padded_keys(qkv):
    q, k, v = qkv(B=2, Lq=640, D=32)
    attention_mask = torch.ones(2, 640, dtype=torch.int64)
    attention_mask[0, :170] = 0
    fn = torch.compile(padded_mask, backend=CrispFlexBackend(SPARSE), fullgraph=True)
    got = fn(q, k, v, attention_mask)
    valid = attention_mask.bool()
    want = masked_attention(q, k, v, routed_blocks(q, k, SPARSE, valid), key_valid=valid)
    assert relative_error(got, want) < 2e-6
    v[0, :, :170] = 1e4  # poison what row 0 must not see
    assert torch.equal(fn(q, k, v, attention_mask)[0, :, 170:], got[0, :, 170:])


def test_dynamic_lengths_take_one_sparse_and_one_dense_graph(qkv):
    backend = CrispFlexBackend(SPARSE)
    fn = torch.compile(causal, backend=backend, dynamic=True, fullgraph=True)
    for L in (640, 300, 1000, 127, 64, 513):
        q, k, v = qkv(Lq=L, D=32)
        want = causal(q, k, v)
        if SPARSE.min_seqlen <= L:
            want = masked_attention(q, k, v, routed_blocks(q, k, SPARSE))
        assert relative_error(fn(q, k, v), want) < 2e-6, L
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert reasons(backend) == [Reason.TOO_SHORT]


def test_a_length_that_is_an_expression_compiles(qkv):
    def shortened(q, k, v):
        return causal(q[:, :, :-1], k[:, :, :-1], v[:, :, :-1])

    q, k, v = qkv(Lq=641, D=32)
    backend = CrispFlexBackend(SPARSE)
    got = torch.compile(shortened, backend=backend, dynamic=True)(q, k, v)
    assert [len(report.rewritten) for report in backend.reports.values()] == [1]
    q, k, v = (x[:, :, :-1] for x in (q, k, v))
    assert relative_error(got, masked_attention(q, k, v, routed_blocks(q, k, SPARSE))) < 2e-6


def test_fused_projection_and_epilogue(qkv):
    """Views of one projection as q, k, v, and pointwise work on the output."""

    class Block(torch.nn.Module):
        def forward(self, x):
            B, L, _ = x.shape
            q, k, v = (t.view(B, L, 4, 32).transpose(1, 2) for t in x.chunk(3, -1))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return out.transpose(1, 2).reshape(B, L, -1).sigmoid() * 2

    x = torch.randn(2, 333, 3 * 4 * 32)
    block = crisp_flex.compile(Block(), CrispConfig(min_seqlen=128, policy="dense"))
    got = block(x)
    assert [len(report.rewritten) for report in crisp_flex.reports(block)] == [1]
    torch.testing.assert_close(got, Block()(x), atol=2e-5, rtol=2e-5)


def test_a_padding_mask_with_dynamic_shapes_stays_dense_on_the_cpu(qkv):
    backend = CrispFlexBackend(SPARSE)
    q, k, v = qkv(B=2, Lq=300, D=32)
    attention_mask = torch.ones(2, 300, dtype=torch.int64)
    fn = torch.compile(padded_mask, backend=backend, dynamic=True)
    assert relative_error(fn(q, k, v, attention_mask), causal(q, k, v)) < 2e-6
    assert reasons(backend) == [Reason.CPU_DYNAMIC_PADDING]


def test_the_result_lies_in_memory_as_sdpas_does():
    """A `.view` behind the call needs the heads beside each other, as after a fused projection."""

    def block(x):
        B, L, _ = x.shape
        q, k, v = (t.view(B, L, 2, 16).transpose(1, 2) for t in x.chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).view(B, L, -1), out

    x = torch.randn(2, 256, 3 * 2 * 16)
    backend = CrispFlexBackend(CrispConfig(min_seqlen=128, policy="dense"))
    (got, out), (want, dense) = torch.compile(block, backend=backend)(x), block(x)
    assert [len(report.rewritten) for report in backend.reports.values()] == [1]
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)
    assert out.stride() == dense.stride()


def test_a_padded_batch_may_change_its_size(qkv):
    fn = torch.compile(padded_mask, backend=CrispFlexBackend(SPARSE))
    for B in (2, 3, 1):
        q, k, v = qkv(B=B, Lq=256, D=32)
        mask = torch.ones(B, 256, dtype=torch.int64)
        assert relative_error(fn(q, k, v, mask), padded_mask(q, k, v, mask)) < 2e-6, B


def test_one_mask_row_may_serve_calls_of_two_batch_sizes(qkv):
    def two(q, k, v, attention_mask):
        valid = attention_mask.to(torch.bool)[:, None, None, :]
        i = torch.arange(256)
        mask = (i <= i[:, None]) & valid
        three = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return three, F.scaled_dot_product_attention(q[:2], k[:2], v[:2], attn_mask=mask)

    q, k, v = qkv(B=3, Hkv=4, Lq=256, D=32)
    attention_mask = torch.arange(256)[None] >= 50
    backend = CrispFlexBackend(CrispConfig(min_seqlen=128, policy="dense"))
    got = torch.compile(two, backend=backend)(q, k, v, attention_mask)
    assert [len(report.rewritten) for report in backend.reports.values()] == [2]
    for mine, want in zip(got, two(q, k, v, attention_mask), strict=True):
        assert relative_error(mine[:, :, 50:], want[:, :, 50:]) < 2e-6


def test_a_model_without_attention_says_so_once(recwarn):
    fn = crisp_flex.compile(lambda x: x.softmax(-1) + 1)
    fn(torch.randn(4))
    fn(torch.randn(4, 4))
    told = [str(w.message) for w in recwarn if "crisp_flex" in str(w.message)]
    assert len(told) == 1
    assert "found no scaled_dot_product_attention call" in told[0]
