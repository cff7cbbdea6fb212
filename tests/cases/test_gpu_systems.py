"""On CUDA: another device than the current one, user streams, CUDA graphs (B29), out of memory."""

import pytest
import torch
from masked_attention import relative_error

import crisp_flex
from crisp_flex import CrispConfig
from tests.cases.peaky import Sdpa, dense, qkv

pytestmark = pytest.mark.gpu
LENGTH = 2048
CONFIG = CrispConfig(min_seqlen=256, coverage=0.999, coverage_reduce="min", audit_rows=8)
TOLERANCE = 2e-2  # bf16


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


def on(device, **kwargs):
    inputs = qkv(Hq=8, Hkv=2, Lq=LENGTH, D=64, **kwargs)
    return tuple(x.to(device, torch.bfloat16) for x in inputs)


def model(**kwargs):
    return crisp_flex.compile(Sdpa(is_causal=True, enable_gqa=True), CONFIG, **kwargs)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_device_than_the_current_one():
    assert torch.cuda.current_device() == 0
    inputs = on("cuda:1")
    for got in (model()(*inputs), crisp_flex.sparse_attention(*inputs, config=CONFIG)):
        assert got.device == torch.device("cuda:1")
        assert relative_error(got, dense(*inputs, is_causal=True)) < TOLERANCE
    assert torch.cuda.current_device() == 0


def test_a_user_stream_is_the_one_that_all_runs_on():
    inputs, compiled = on("cuda"), model()
    want = compiled(*inputs)
    stream = torch.cuda.Stream()
    slow = torch.randn(4096, 4096, device="cuda")
    with torch.cuda.stream(stream):
        for _ in range(20):  # what is made here late must not be read early
            slow = slow @ slow * 1e-3
        late = tuple(x + 0 * slow[0, 0].nan_to_num().to(x.dtype) for x in inputs)
        got = compiled(*late)
        routed = crisp_flex.sparse_attention(*late, config=CONFIG)
    stream.synchronize()
    assert torch.equal(got, want)
    assert relative_error(routed, dense(*inputs, is_causal=True)) < TOLERANCE


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs"])
def test_b29_a_replay_never_uses_the_blocks_of_another_prompt(mode):
    first, second = on("cuda", columns=(0.0, 0.2)), on("cuda", columns=(0.0, 0.8), seed=1)
    compiled = model(mode=mode)
    for _ in range(4):
        a, b = compiled(*first).clone(), compiled(*second).clone()
    assert relative_error(a, dense(*first, is_causal=True)) < TOLERANCE
    assert relative_error(b, dense(*second, is_causal=True)) < TOLERANCE


def test_after_running_out_of_memory_the_model_still_works():
    inputs, compiled = on("cuda"), model()
    want = compiled(*inputs)
    many = tuple(x.repeat(64, 1, 1, 1) for x in inputs)
    torch.cuda.empty_cache()
    fraction = (torch.cuda.memory_reserved() + (1 << 20)) / torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(fraction)
    try:
        with pytest.raises(torch.cuda.OutOfMemoryError):
            compiled(*many)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.equal(compiled(*inputs), want)
