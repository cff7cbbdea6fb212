"""On CUDA, through Inductor: chunks, caches longer than their filling, windows."""

import pytest
import torch
import torch.nn.functional as F
from masked_attention import masked_attention, relative_error
from routed_blocks import routed_blocks

from crisp_flex import CrispConfig, CrispFlexBackend

pytestmark = pytest.mark.gpu

SPARSE = CrispConfig(
    min_seqlen=512, policy="streaming", streaming_blocks=1, dense_last_blocks=0, max_uncovered=1.0
)
DYNAMIC = pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
PADDED = pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


def chunk(q, k, v, past, attention_mask=None, window=None):
    """A later chunk as transformers writes it; past is a number or a 0-dim tensor."""
    B, _, Lq, _ = q.shape
    Lkv = k.shape[2]
    query = torch.arange(Lq, device=q.device)[None, None, :, None] + past
    key = torch.arange(Lkv, device=q.device)[None, None, None, :]
    mask = key <= query
    if window is not None:
        mask = mask & (key > query - window)
    if attention_mask is not None:
        batch = torch.arange(B, device=q.device)[:, None, None, None]
        padded = F.pad(attention_mask.bool(), (0, Lkv - attention_mask.shape[1]))
        mask = mask & padded[batch, key]
    mask = mask.expand(B, -1, Lq, Lkv)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def inputs(qkv, Lq, Lkv, D=128):
    return qkv(B=2, Hq=8, Hkv=2, Lq=Lq, Lkv=Lkv, D=D, dtype=torch.bfloat16, device="cuda")


def left_padded(L):
    mask = torch.ones(2, L, dtype=torch.int64, device="cuda")
    mask[0, :300] = 0
    return mask


def kernels(backend):
    return {site.kernel for report in backend.reports.values() for site in report.rewritten}


@DYNAMIC
@PADDED
@pytest.mark.parametrize("D", [64, 128])
def test_a_chunk_equals_the_masked_reference(D, padded, dynamic, qkv):
    backend = CrispFlexBackend(SPARSE)
    fn = torch.compile(chunk, backend=backend, dynamic=dynamic)
    for Lq, past in ((1024, 512), (1000, 777)):
        q, k, v = inputs(qkv, Lq, Lq + past, D)
        valid = left_padded(Lq + past) if padded else None
        got = fn(q, k, v, past, valid)
        key_valid = None if valid is None else valid.bool()
        keep = routed_blocks(q, k, SPARSE, key_valid)
        want = masked_attention(q, k, v, keep, key_valid=key_valid)
        assert relative_error(got, want) < 5e-3, (Lq, past)
        assert relative_error(got, chunk(q, k, v, past, valid)) > 0.05
    assert kernels(backend) <= ({"TRITON"} if padded or dynamic else {"FLASH", "TRITON"})


@PADDED
@pytest.mark.parametrize("where", ["number", "tensor"])
def test_the_unfilled_end_of_a_cache_is_never_read(where, padded, qkv):
    past, Lq = 640, 1000
    filled = past + Lq
    q, k, v = inputs(qkv, Lq, 4096)
    # a weight of 0 times NaN is NaN where a value is loaded with its whole block, as in dense SDPA
    k[:, :, filled:] = float("nan")
    v[:, :, filled:] = float("nan") if where == "number" else 1e4
    valid = left_padded(filled) if padded else None
    backend = CrispFlexBackend(SPARSE)
    at = torch.tensor(past, device="cuda") if where == "tensor" else past
    got = torch.compile(chunk, backend=backend, dynamic=False)(q, k, v, at, valid)
    assert kernels(backend)
    k, v = k[:, :, :filled], v[:, :, :filled]
    key_valid = None if valid is None else valid.bool()
    want = masked_attention(q, k, v, routed_blocks(q, k, SPARSE, key_valid), key_valid=key_valid)
    assert relative_error(got, want) < 5e-3


@DYNAMIC
@PADDED
@pytest.mark.parametrize("window", [1, 200, 512])
def test_a_window_equals_dense(window, padded, dynamic, qkv):
    backend = CrispFlexBackend(SPARSE)
    fn = torch.compile(chunk, backend=backend, dynamic=dynamic)
    for Lq, past in ((2048, 0), (1000, 777)):
        q, k, v = inputs(qkv, Lq, Lq + past)
        valid = left_padded(Lq + past) if padded else None
        got, want = fn(q, k, v, past, valid, window), chunk(q, k, v, past, valid, window)
        assert got.isfinite().all()
        rows = slice(max(300 - past, 0) if padded else 0, None)
        assert relative_error(got[:, :, rows], want[:, :, rows]) < 5e-3, (Lq, past)
    assert kernels(backend) == {"TRITON"}
