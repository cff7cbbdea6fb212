"""On CUDA: milliseconds of short prompts (B06), memory of long ones (B08), the first call (B16)."""

import time

import pytest
import torch
from masked_attention import relative_error

import crisp_flex
from crisp_flex import CrispConfig
from tests.cases.peaky import Sdpa, dense, qkv
from tests.families.models import make

pytestmark = pytest.mark.gpu
TOLERANCE = 2e-2  # bf16


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


def on_cuda(**kwargs):
    return tuple(x.to("cuda", torch.bfloat16) for x in qkv(**kwargs))


def milliseconds(fn, repeats=20):
    """Median of repeats, each after the device is idle."""
    for _ in range(3):
        fn()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        fn()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return sorted(times)[repeats // 2]


@pytest.mark.parametrize("n", [1, 7, 100, 512, 2048, 4096, 8192, 16384])
def test_b06_no_length_is_slower_than_dense(n):
    q, k, v = on_cuda(Hq=32, Lq=n, D=128)
    model = crisp_flex.compile(Sdpa(is_causal=True))
    assert relative_error(model(q, k, v), dense(q, k, v, is_causal=True)) < TOLERANCE
    plain = milliseconds(lambda: dense(q, k, v, is_causal=True))
    ours = milliseconds(lambda: model(q, k, v))
    assert ours < 1.15 * plain + 0.1, f"{ours:.3f} ms, dense {plain:.3f} ms"


def extra_bytes(fn):
    fn()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fn()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_b08_memory_at_128k_is_that_of_dense_and_the_index_lists():
    n, H, block = 131072, 8, 128
    q, k, v = on_cuda(Hq=H, Lq=n, D=128)
    model = crisp_flex.compile(Sdpa(is_causal=True))
    ours = extra_bytes(lambda: model(q, k, v))
    plain = extra_bytes(lambda: dense(q, k, v, is_causal=True))
    table = 4 * 4 * H * (n // block) ** 2  # four int32 tables
    assert ours <= plain + 2 * table + 2 * q.nbytes
    rows = slice(n - 256, n)
    mask = torch.arange(n, device="cuda") <= torch.arange(n, device="cuda")[rows, None]
    want = dense(q[:, :, rows], k, v, attn_mask=mask)
    assert relative_error(model(q, k, v)[:, :, rows], want) < TOLERANCE


def first_call_seconds(how, layers, folder, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    torch._dynamo.reset()
    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 8}
    model = make("Llama", num_hidden_layers=layers, head_dim=64, vocab_size=512, **sizes)
    model = model.to("cuda", torch.bfloat16)
    ids = torch.randint(3, 500, (1, 16384), device="cuda")
    compiled = torch.compile(model) if how == "inductor" else crisp_flex.compile(model)
    start = time.perf_counter()
    compiled(input_ids=ids, logits_to_keep=1, use_cache=False)
    torch.cuda.synchronize()
    return time.perf_counter() - start


@pytest.mark.parametrize("layers", [2, 8])
def test_b16_the_first_call_is_close_to_inductors(layers, tmp_path, monkeypatch):
    plain, ours = (
        first_call_seconds(how, layers, tmp_path / how, monkeypatch)
        for how in ("inductor", "crisp_flex")
    )
    assert ours < 2 * plain + 20, f"{ours:.1f} s, inductor {plain:.1f} s"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("D", [72, 128, 192, 256, 264])
def test_b17_every_head_dim_and_dtype_runs(D, dtype):
    q, k, v = (x.to("cuda", dtype) for x in qkv(Hq=4, Lq=2048, D=D))
    config = CrispConfig(min_seqlen=1024, coverage=0.999, coverage_reduce="min", audit_rows=8)
    got = crisp_flex.compile(Sdpa(is_causal=True), config)(q, k, v)
    assert got.dtype == dtype
    assert relative_error(got, dense(q, k, v, is_causal=True)) < TOLERANCE


@pytest.mark.parametrize("block_size", [(64, 64), (128, 64), (256, 128), (256, 256)])
@pytest.mark.parametrize("D", [64, 256])
def test_b17_every_block_size_runs(D, block_size):
    q, k, v = on_cuda(Hq=4, Lq=2048, D=D)
    config = CrispConfig(
        min_seqlen=1024, block_size=block_size, coverage=0.999, coverage_reduce="min", audit_rows=8
    )
    got = crisp_flex.compile(Sdpa(is_causal=True), config)(q, k, v)
    assert relative_error(got, dense(q, k, v, is_causal=True)) < TOLERANCE
