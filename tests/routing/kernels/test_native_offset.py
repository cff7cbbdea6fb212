"""A position of query 0 in a tensor, on the GPU: the reference's lists, and no read-back."""

import pytest
import torch

from tests.routing.inputs import key_mask, long_structured, params

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

if torch.cuda.is_available():
    from crisp_flex.routing.kernels import dispatch
    from crisp_flex.routing.ops import route
    from tests.routing.kernels.compare import check_route
    from tests.routing.kernels.compare_unaudited import check_unaudited

POLICIES = {
    "hybrid": {"policy": "hybrid", "coverage": 0.8},
    "lines": {"policy": "crisp", "router": "vs", "max_uncovered": 1.0},
    "estimate": {"policy": "crisp", "router": "pe", "max_uncovered": 1.0},
    "jsd": {"policy": "crisp", "router": "jsd"},
    "streaming": {"policy": "streaming", "streaming_blocks": 4},
    "dense": {"policy": "dense"},
}
# (Lq, filled, Lkv); query 0 stands at filled - Lq
CACHES = [(1000, 1000, 4096), (777, 2933, 4096), (1024, 2048, 4096), (1500, 4000, 4000)]


def cache(Lq, filled, Lkv, *, block=(128, 128), mask="none", **changes):
    """Arguments of a call over a cache whose unfilled part holds NaN."""
    query, key = long_structured(filled, 128, G=2, device="cuda")
    rest = torch.full((1, 1, Lkv - filled, 128), float("nan"), device="cuda")
    key = torch.cat([key, rest], 2).bfloat16()
    key_valid = key_mask(mask, 1, Lkv)
    key_valid = None if key_valid is None else key_valid.cuda()
    offset = torch.tensor([filled - Lq], device="cuda")
    return query[:, :, -Lq:].bfloat16(), key, key_valid, params(128, block, **changes), offset


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shape", CACHES, ids=str)
@pytest.mark.parametrize("block", [(128, 128), (64, 64), (128, 64), (64, 128)], ids=str)
def test_route_equals_the_reference(shape, block, policy):
    check = check_route if policy == "hybrid" else check_unaudited
    check(*cache(*shape, block=block, **POLICIES[policy]))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mask", ["left", "holes"])
def test_with_a_key_mask(mask, policy):
    check = check_route if policy == "hybrid" else check_unaudited
    check(*cache(777, 2933, 4096, mask=mask, **POLICIES[policy]))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_the_op_takes_the_kernels(dtype, monkeypatch):
    *arguments, offset = cache(777, 2933, 4096, **POLICIES["hybrid"])
    called = []
    routed = dispatch.route
    monkeypatch.setattr(dispatch, "route", lambda *a: called.append(a) or routed(*a))
    assert_equal_lists(route(*arguments, offset.to(dtype)), routed(*arguments, offset))
    assert len(called) == 1


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mask", ["none", "left"])
def test_no_synchronisation(mask, policy):
    arguments = cache(777, 2933, 4096, mask=mask, **POLICIES[policy])
    dispatch.route(*arguments)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        dispatch.route(*arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_graph_replays_at_another_offset(policy):
    *arguments, offset = cache(512, 2933, 4096, **POLICIES[policy])
    elsewhere = torch.tensor([1000], device="cuda")
    want = dispatch.route(*arguments, elsewhere)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = dispatch.route(*arguments, offset)
    offset.copy_(elsewhere)
    graph.replay()
    torch.cuda.synchronize()
    assert_equal_lists(got, want)


def test_a_full_cache_keeps_what_no_offset_keeps():
    *arguments, offset = cache(1500, 4000, 4000, **POLICIES["hybrid"])
    got, want = dispatch.route(*arguments, offset), dispatch.route(*arguments)
    assert torch.equal(got[0] + got[2], want[0] + want[2])
    assert (got[3] - want[3]).abs().max() < 1e-4


def assert_equal_lists(got, want):
    """Counts, statistics and the listed blocks; unused slots of the lists are undefined."""
    for i in (0, 2, 3):
        assert torch.equal(got[i], want[i])
    Nkv = -(-4096 // 128)
    P = want[1].shape[3] - Nkv
    for lists, counts in ((slice(0, P), want[0]), (slice(P, None), want[2])):
        used = torch.arange(want[1][..., lists].shape[3], device="cuda") < counts[..., None]
        assert torch.equal(got[1][..., lists][used], want[1][..., lists][used])
