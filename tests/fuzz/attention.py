"""Whole calls: crisp_flex.compile of one SDPA call (CPU), and sparse_attention (CUDA).

Against softmax in float64 over the blocks that route lists, which for policy "dense" is SDPA.
"""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

import crisp_flex
from crisp_flex import CrispConfig
from tests.cases.peaky import Sdpa
from tests.masked_attention import masked_attention
from tests.routed_blocks import routed_blocks
from tests.routing.inputs import structured

POLICIES = (
    {"policy": "hybrid", "coverage": 0.8},
    {"policy": "streaming", "streaming_blocks": 2, "max_uncovered": 1.0},
    {"policy": "dense"},
)
# (Hq, Hkv, D, Dv, dtype); few, since each is a kernel to compile.
ON_CUDA = (
    (4, 2, 64, 64, torch.bfloat16),
    (14, 2, 64, 64, torch.float16),
    (5, 1, 128, 64, torch.bfloat16),
    (2, 2, 80, 80, torch.float16),
)
ON_CPU = ((4, 2, 16, 16, torch.float32), (3, 1, 32, 16, torch.float32))
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


@dataclass(frozen=True, slots=True)
class Call:
    """Shapes and settings of one call; the tensors follow from the seed."""

    B: int
    heads: tuple
    Lq: int
    Lkv: int
    pads: int
    seed: int
    settings: tuple


@st.composite
def calls(draw, device):
    """Few shapes of heads, any length; chunks and left padding on CUDA only."""
    on_cuda = device == "cuda"
    Lq = draw(st.integers(300, 1500) if on_cuda else st.sampled_from([256, 300, 321]))
    chunk = draw(st.sampled_from([0, 0, 1, 100, 515])) if on_cuda else 0
    pads = draw(st.sampled_from([0, 0, 1, 64, 130])) if on_cuda else 0
    return Call(
        B=draw(st.integers(1, 2)),
        heads=draw(st.sampled_from(ON_CUDA if on_cuda else ON_CPU)),
        Lq=Lq,
        Lkv=Lq + chunk,
        pads=pads,
        seed=draw(st.integers(0, 1 << 20)),
        settings=tuple(draw(st.sampled_from(POLICIES)).items()),
    )


def check(call, *, device):
    """Assert the result of a call and that it is the same bits twice; the policy's name."""
    Hq, Hkv, D, Dv, dtype = call.heads
    Lq, Lkv = call.Lq, call.Lkv
    query, key = structured(call.B, Hq, Hkv, Lq, Lkv, D, seed=call.seed, dtype=dtype)
    gen = torch.Generator().manual_seed(call.seed)
    value = torch.randn(call.B, Hkv, Lkv, Dv, generator=gen).to(dtype)
    query, key, value = (x.to(device) for x in (query, key, value))
    block = (64, 64)
    config = CrispConfig(block_size=block, min_seqlen=64, **dict(call.settings))
    valid = None
    if call.pads:
        valid = torch.ones(call.B, Lkv, dtype=torch.bool, device=device)
        valid[0, : call.pads] = False
    keep = routed_blocks(query, key, config, valid)
    want = masked_attention(query, key, value, keep, block, valid)
    if device == "cuda":

        def run(v):
            return crisp_flex.sparse_attention(query, key, v, config=config, key_valid=valid)
    else:
        torch._dynamo.reset()
        model = crisp_flex.compile(Sdpa(is_causal=True, enable_gqa=Hq != Hkv), config)

        def run(v):
            return model(query, key, v)

    got = run(value)
    assert got.isfinite().all()
    # rows of padding keep one block, which two ways of counting rows may disagree on
    first = max(call.pads - (Lkv - Lq), 0)
    error = (got.float() - want)[:, :, first:].norm() / want[:, :, first:].norm()
    assert error < TOLERANCE[dtype], f"relative error {error:.2g}"
    assert torch.equal(run(value), got), "a second run differs"
    poisoned = value.clone()
    poisoned[:, :, -1] = 1e4
    assert torch.equal(run(poisoned)[:, :, :-1], got[:, :, :-1]), "a row sees the future"
    return dict(call.settings)["policy"]
