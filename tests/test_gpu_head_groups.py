"""On the GPU: head groups against the masked reference, their memory, and D 256 on FLASH."""

import pytest
import torch
from graphs import causal
from masked_attention import masked_attention, relative_error
from routed_blocks import routed_blocks
from test_gpu import peaky

import crisp_flex
from crisp_flex import CrispConfig, CrispFlexBackend, flex_hop, head_groups

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


def compiled(config, dynamic=None):
    backend = CrispFlexBackend(config)
    return torch.compile(causal, backend=backend, dynamic=dynamic), backend


def sites(backend):
    return [site for report in backend.reports.values() for site in report.sites]


@pytest.mark.parametrize("kernel", ["TRITON", "FLASH"])
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("L", [4096, 3000])
def test_groups_equal_the_masked_reference(kernel, count, L, monkeypatch):
    if kernel == "FLASH" and not flex_hop.flash_available():
        pytest.skip("flash-attn-4 is not installed")
    monkeypatch.setattr(head_groups, "count_groups_of", lambda *args, **kwargs: count)
    config = CrispConfig(min_seqlen=1024, backend=kernel.lower(), dense_last_blocks=0)
    q, k, v = peaky(2, 8, 2, L, 128)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    fn, backend = compiled(config)
    got = fn(q, k, v)
    assert [(site.kernel, site.head_groups) for site in sites(backend)] == [(kernel, count)]
    want = masked_attention(q, k, v, routed_blocks(q, k, config))
    assert relative_error(got, want) < 3e-3
    assert got.stride() == causal(q, k, v).stride()
    assert relative_error(crisp_flex.sparse_attention(q, k, v, config=config), want) < 3e-3


def test_long_prompts_have_a_dynamic_graph_with_groups(monkeypatch):
    monkeypatch.setattr(head_groups, "ONE_GROUP_TOKENS", 3000)
    monkeypatch.setattr(head_groups, "MAX_TABLE_SHARE", 1e-3)
    config = CrispConfig(min_seqlen=1024, backend="triton", dense_last_blocks=0)
    fn, backend = compiled(config, dynamic=True)
    for L in (2048, 4000, 3000, 5000):
        q, k, v = peaky(1, 8, 2, L, 128)
        want = masked_attention(q, k, v, routed_blocks(q, k, config))
        assert relative_error(fn(q, k, v), want) < 3e-3, L
    # one graph without groups; with them one up to 4096 tokens, and one up to 8192
    assert [site.head_groups > 1 for site in sites(backend)] == [False, True, True]


def test_d_256_takes_key_blocks_of_64_where_flash_is_there():
    flash = flex_hop.flash_available() and torch.cuda.get_device_capability() == (9, 0)
    block_size = (128, 64) if flash else (128, 128)
    q, k, v = peaky(1, 8, 2, 3000, 256)
    fn, backend = compiled(CrispConfig(min_seqlen=1024, dense_last_blocks=0))
    got = fn(q, k, v)
    assert [site.kernel for site in sites(backend)] == ["FLASH" if flash else "TRITON"]
    settings = CrispConfig(block_size=block_size, dense_last_blocks=0)
    want = masked_attention(q, k, v, routed_blocks(q, k, settings), block_size)
    assert relative_error(got, want) < 3e-3


@pytest.mark.parametrize("block_size", [(64, 64), (128, 64)])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_triton_takes_blocks_smaller_than_its_tiles(D, block_size):
    config = CrispConfig(
        min_seqlen=1024, backend="triton", dense_last_blocks=0, block_size=block_size
    )
    q, k, v = peaky(1, 8, 2, 2000, D)
    fn, _ = compiled(config)
    want = masked_attention(q, k, v, routed_blocks(q, k, config), block_size)
    assert relative_error(fn(q, k, v), want) < 3e-3


def peak_bytes(fn, *args):
    """Allocated at most while fn runs, inputs and result included."""
    fn(*args)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    out = fn(*args)
    torch.cuda.synchronize()
    del out
    return torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("way", ["compiled", "sparse_attention"])
def test_the_memory_at_256k_is_that_of_dense_attention_and_the_table(way):
    L = 262144
    q, k, v = peaky(1, 32, 8, L, 128)
    torch.cuda.empty_cache()
    fn = compiled(CrispConfig(backend="triton"))[0]
    if way == "sparse_attention":
        fn = crisp_flex.sparse_attention
    dense, sparse = peak_bytes(causal, q, k, v), peak_bytes(fn, q, k, v)
    groups = head_groups.count_groups_of(q, k, v, block_size=(128, 128), has_key_valid=False)
    table = head_groups.table_bytes(
        32 // groups, Lq=L, Lkv=L, block_size=(128, 128), has_key_valid=False
    )
    assert groups == 8
    assert sparse < 1.1 * dense + table
