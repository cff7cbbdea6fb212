"""On the GPU: the dense last blocks as a flash call, in the graph and in the library call."""

import pytest
import torch
from graphs import causal
from masked_attention import masked_attention, relative_error
from routed_blocks import routed_blocks
from test_gpu import peaky

import crisp_flex
from crisp_flex import CrispConfig, CrispFlexBackend, flex_hop, head_groups, last_rows

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("kernel", ["TRITON", "FLASH"])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(("D", "blocks"), [(64, 1), (128, 2)])
def test_last_blocks_equal_the_reference(kernel, count, D, blocks, monkeypatch):
    if kernel == "FLASH" and not flex_hop.flash_available():
        pytest.skip("flash-attn-4 is not installed")
    monkeypatch.setattr(head_groups, "count_groups_of", lambda *args, **kwargs: count)
    config = CrispConfig(min_seqlen=1024, backend=kernel.lower(), dense_last_blocks=blocks)
    q, k, v = peaky(2, 8, 2, 3000, D)
    backend = CrispFlexBackend(config)
    got = torch.compile(causal, backend=backend)(q, k, v)
    keep = routed_blocks(q, k, config)
    assert keep[:, :, -1].all()
    want = masked_attention(q, k, v, keep)
    first = last_rows.first_token(3000, 128, blocks)
    for part in (slice(0, first), slice(first, None)):
        assert relative_error(got[:, :, part], want[:, :, part]) < 3e-3
    got = crisp_flex.sparse_attention(q, k, v, config=config)
    assert relative_error(got, want) < 3e-3


@pytest.mark.parametrize(("Lq", "Lkv", "D"), [(128, 4096, 80), (700, 3001, 256), (100, 100, 96)])
def test_op_equals_dense_attention(Lq, Lkv, D):
    q, k, v = peaky(2, 6, 2, Lkv, D)
    q = q[:, :, Lkv - Lq :]
    out = torch.full_like(q, 7.0)
    torch.ops.crisp_flex.write_last_rows(out, q, k, v, D**-0.5, 128, 1)
    first = last_rows.first_token(Lq, 128, 1)
    visible = torch.ones(Lq, Lkv, dtype=torch.bool, device="cuda").tril(Lkv - Lq)
    want = torch.nn.functional.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), attn_mask=visible, scale=D**-0.5, enable_gqa=True
    )
    assert relative_error(out[:, :, first:], want[:, :, first:]) < 3e-3
    assert (out[:, :, :first] == 7).all()


def test_op_is_registered_right():
    q, k, v = peaky(1, 4, 2, 300, 64)
    args = (torch.empty_like(q), q, k, v, 0.125, 128, 1)
    torch.library.opcheck(torch.ops.crisp_flex.write_last_rows.default, args)
