"""On the GPU: the sparse kernels against an fp32 masked reference, and what the profiler sees."""

import pytest
import torch
import torch.nn.functional as F
from graphs import causal, causal_mask, padded_mask
from masked_attention import masked_attention, relative_error
from routed_blocks import routed_blocks

import crisp_flex
from crisp_flex import CrispConfig, CrispFlexBackend, flex_hop
from crisp_flex.routing import ops
from crisp_flex.routing.params import RouteParams

pytestmark = pytest.mark.gpu

KERNELS = ("TRITON", "FLASH")
HEADS = {"9/3": (9, 3), "32/8": (32, 8)}


def compiled(fn, kernel, **settings):
    if kernel == "FLASH" and not flex_hop.flash_available():
        pytest.skip("flash-attn-4 is not installed")
    backend = CrispFlexBackend(
        CrispConfig(min_seqlen=1024, backend=kernel.lower(), dense_last_blocks=0, **settings)
    )
    return torch.compile(fn, backend=backend), backend


def lists(q, k, key_valid=None):
    return routed_blocks(q, k, CrispConfig(dense_last_blocks=0), key_valid)


def peaky(B, Hq, Hkv, L, D, dtype=torch.bfloat16):
    """Inputs whose heads look at three columns, so that the routing drops blocks."""
    q, k = (0.3 * torch.randn(B, H, L, D, device="cuda") for H in (Hq, Hkv))
    v = torch.randn(B, Hkv, L, D, device="cuda")
    u = F.normalize(torch.randn(D, device="cuda"), dim=0) * (12 * D**0.5) ** 0.5
    q += u
    k[:, :, torch.tensor([0, L // 3, L // 2], device="cuda")] += u
    return q.to(dtype), k.to(dtype), v.to(dtype)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("L", [4096, 3000])
def test_sparse_equals_the_masked_reference(kernel, D, heads, L):
    q, k, v = peaky(1, *HEADS[heads], L, D)
    fn, backend = compiled(causal, kernel)
    with torch.no_grad():
        got = fn(q, k, v)
    assert [site.kernel for r in backend.reports.values() for site in r.sites] == [kernel]
    keep = lists(q, k)
    assert keep.float().mean() < 0.45  # blocks were dropped, so this is no dense call
    assert relative_error(got, masked_attention(q, k, v, keep)) < 3e-3


def test_left_padding_and_repeated_heads():
    """On TRITON even with FLASH there: torch 2.11 frees a captured tensor too early for FLASH."""
    L = 2500
    q, k, v = peaky(2, 32, 8, L, 128)
    attention_mask = torch.ones(2, L, dtype=torch.int64, device="cuda")
    attention_mask[0, :700] = 0
    backend = CrispFlexBackend(CrispConfig(min_seqlen=1024, dense_last_blocks=0))
    fn = torch.compile(padded_mask, backend=backend)
    with torch.no_grad():
        got = fn(q, k, v, attention_mask)
    (report,) = backend.reports.values()
    assert [(site.mask, site.kernel) for site in report.sites] == [("causal + padding", "TRITON")]
    valid = attention_mask.bool()
    want = masked_attention(q, k, v, lists(q, k, valid), key_valid=valid)
    assert got.isfinite().all()
    assert relative_error(got[0, :, 700:], want[0, :, 700:]) < 3e-3
    assert relative_error(got[1], want[1]) < 3e-3


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_dynamic_graph_serves_many_lengths(kernel):
    fn, backend = compiled(causal, kernel)
    fn = torch.compile(causal, backend=backend, dynamic=True)
    with torch.no_grad():
        for L in (2048, 3000, 5000, 8192):
            q, k, v = peaky(1, 8, 2, L, 128)
            assert relative_error(fn(q, k, v), masked_attention(q, k, v, lists(q, k))) < 3e-3, L
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("kernel", KERNELS)
def test_dense_policy_equals_sdpa(kernel):
    q, k, v = peaky(2, 8, 2, 2048, 64)
    fn, _ = compiled(causal, kernel, policy="dense")
    with torch.no_grad():
        assert relative_error(fn(q, k, v), causal(q, k, v)) < 3e-3


@pytest.mark.parametrize("D", [80, 96, 256])
def test_other_head_dims(D):
    q, k, v = peaky(1, 8, 2, 2048, D)
    fn, _ = compiled(causal, "TRITON")
    with torch.no_grad():
        assert relative_error(fn(q, k, v), masked_attention(q, k, v, lists(q, k))) < 3e-3


def test_the_profiler_sees_the_sparse_kernel_and_no_repeat():
    q, k, v = peaky(1, 32, 8, 4096, 128)
    fn, _ = compiled(causal_mask, "TRITON")
    with torch.no_grad():
        fn(q, k, v)
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
            fn(q, k, v)
            torch.cuda.synchronize()
    events = profile.key_averages(group_by_input_shape=True)
    assert any("flex_attention" in event.key for event in events)
    repeated = [[*list(k.shape[:1]), 32, *list(k.shape[2:])]]
    moved = ("aten::clone", "aten::copy_", "aten::repeat_interleave", "aten::_unsafe_view")
    assert not [
        event for event in events if event.key in moved and repeated[0] in event.input_shapes
    ]


def test_the_op_passes_opcheck():
    for key_valid in (None, torch.rand(2, 300, device="cuda") > 0.2):
        q, k, _ = peaky(2, 6, 2, 300, 64)
        params = RouteParams.from_config(CrispConfig(), D=64)
        torch.library.opcheck(
            torch.ops.crisp_flex.route.default, (q, k, key_valid, *params.as_args())
        )


def test_compile_makes_a_model_sparse_on_the_gpu():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=512,
        max_position_embeddings=1 << 15,
    )
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
    ids = torch.randint(0, 512, (1, 3000), device="cuda")
    with torch.no_grad():
        want = model(ids).logits
        compiled_model = crisp_flex.compile(model, CrispConfig(min_seqlen=1024, policy="dense"))
        got = compiled_model(ids).logits
    (report,) = crisp_flex.reports(model)
    assert len(report.rewritten) == 2
    assert relative_error(got, want) < 1e-2


@pytest.mark.parametrize("kernel", KERNELS)
def test_sparse_attention_as_a_function(kernel):
    """A whole prompt, and a chunk after a cache, which the last key aligns."""
    if kernel == "FLASH" and not flex_hop.flash_available():
        pytest.skip("flash-attn-4 is not installed")
    config = CrispConfig(min_seqlen=512, backend=kernel.lower(), dense_last_blocks=0)
    for Lq in (4096, 1500):
        q, k, v = peaky(2, 8, 2, 4096, 128)
        q = q[:, :, -Lq:]
        got = crisp_flex.sparse_attention(q, k, v, config=config)
        assert relative_error(got, masked_attention(q, k, v, lists(q, k))) < 3e-3, Lq


@pytest.mark.parametrize("policy", ["hybrid", "crisp", "streaming", "dense"])
def test_route_never_waits_for_the_gpu(policy):
    q, k, _ = peaky(2, 8, 2, 3000, 64)
    params = RouteParams.from_config(CrispConfig(policy=policy), D=64)
    key_valid = torch.arange(3000, device="cuda").expand(2, -1) >= 300
    for valid in (None, key_valid):
        ops.route(q, k, valid, params)
        torch.cuda.set_sync_debug_mode("error")
        try:
            ops.route(q, k, valid, params)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("policy", ["hybrid", "crisp"])
def test_route_allocates_far_less_than_a_map(policy):
    L, H = 16384, 8
    q, k, _ = peaky(1, H, 2, L, 64)
    params = RouteParams.from_config(CrispConfig(policy=policy), D=64)
    ops.route(q, k, None, params)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ops.route(q, k, None, params)
    assert torch.cuda.max_memory_allocated() - before < H * L * L // 2  # a bool map is H * L * L
