"""Policies "crisp", "streaming" and "dense" on the GPU against the eager reference there."""

import pytest
import torch

from tests.routing.inputs import key_mask, long_structured, params, structured

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

if torch.cuda.is_available():
    from crisp_flex.routing.kernels import dispatch
    from tests.routing.kernels.compare_unaudited import check_estimate_mass, check_unaudited
    from tests.routing.kernels.test_native import assert_same

LINES = {"policy": "crisp", "router": "vs", "max_uncovered": 1.0}
ESTIMATE = {"policy": "crisp", "router": "pe", "max_uncovered": 1.0}
POLICIES = {
    "lines": LINES,
    "estimate": ESTIMATE,
    "c_struct": {"policy": "crisp"},
    "jsd": {"policy": "crisp", "router": "jsd"},
    "streaming": {"policy": "streaming", "streaming_blocks": 4},
    "dense": {"policy": "dense"},
}


def inputs(L, D=128, *, B=1, Hkv=2, G=2, Lkv=None, mask="none", dtype=torch.bfloat16, **changes):
    """query, key, key_valid and params on the GPU; block= among the changes."""
    Lkv = Lkv or L
    settings = params(D, changes.pop("block", (128, 128)), **changes)
    query, key = structured(B, Hkv * G, Hkv, L, Lkv, D, dtype=dtype)
    key_valid = key_mask(mask, B, Lkv)
    return query.cuda(), key.cuda(), None if key_valid is None else key_valid.cuda(), settings


def long_inputs(L, *, D=128, Hkv=1, G=2, block=(128, 128), **changes):
    """As inputs, for lengths beyond those that structured takes."""
    query, key = long_structured(L, D, Hkv=Hkv, G=G, device="cuda")
    return query.bfloat16(), key.bfloat16(), None, params(D, block, **changes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("D", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("policy", ["lines", "estimate", "jsd"])
def test_head_dims(D, dtype, policy):
    check_unaudited(*inputs(1000, D, dtype=dtype, **POLICIES[policy]))


@pytest.mark.parametrize("G", [1, 3, 4, 7, 8])
@pytest.mark.parametrize("policy", ["lines", "estimate", "c_struct", "streaming"])
def test_groups(G, policy):
    check_unaudited(*inputs(1000, G=G, B=3, Hkv=1, **POLICIES[policy]))


@pytest.mark.parametrize("L", [1, 100, 128, 129])
@pytest.mark.parametrize("policy", POLICIES)
def test_lengths(L, policy):
    check_unaudited(*inputs(L, dense_last_blocks=0, **POLICIES[policy]))


@pytest.mark.parametrize("L", [4096, 5000])
@pytest.mark.parametrize("block", [(128, 128), (64, 64), (128, 64), (64, 128)], ids=str)
@pytest.mark.parametrize("policy", POLICIES)
def test_longer_lengths_and_block_sizes(L, block, policy):
    arguments = long_inputs(L, block=block, **POLICIES[policy])
    check_unaudited(*arguments)
    if policy == "estimate":
        check_estimate_mass(*arguments)


@pytest.mark.parametrize("mask", ["left", "right", "holes", "all false in the first"])
@pytest.mark.parametrize("block", [(128, 128), (64, 64)], ids=str)
@pytest.mark.parametrize("policy", POLICIES)
def test_key_masks(mask, block, policy):
    check_unaudited(*inputs(1000, B=3, mask=mask, block=block, **POLICIES[policy]))


@pytest.mark.parametrize("Lq", [384, 300])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_chunk(Lq, policy):
    check_unaudited(*inputs(Lq, Lkv=1200, **POLICIES[policy]))


@pytest.mark.parametrize("gamma", [0.5, 0.95, 1.0])
def test_gamma(gamma):
    arguments = long_inputs(20000, G=4, **{**ESTIMATE, "gamma": gamma})
    check_estimate_mass(*arguments)
    if gamma < 1:  # at 1 the rounding of a sum over all entries says where it ends
        check_unaudited(*arguments)


@pytest.mark.parametrize("k_min", [0, 8, 300])
def test_k_min(k_min):
    check_unaudited(*long_inputs(20000, G=4, **{**LINES, "k_min": k_min, "alpha": 4.0}))


@pytest.mark.parametrize("policy", ["lines", "estimate", "streaming"])
def test_a_long_ragged_prompt(policy):
    arguments = long_inputs(131072 + 37, **{**POLICIES[policy], "max_uncovered": 1.0})
    kept = check_unaudited(*arguments)
    assert (kept > 0).float().mean() < 0.48  # half of them are visible
    if policy == "estimate":
        check_estimate_mass(*arguments)


def test_any_strides():
    query, key, _, settings = long_inputs(3000, policy="crisp", router="jsd", max_uncovered=1.0)
    other_order = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key)]
    every_second = [x.repeat_interleave(2, -1)[..., ::2] for x in (query, key)]
    for changed in (other_order, every_second):
        check_unaudited(*changed, None, settings)


@pytest.mark.parametrize("policy", POLICIES)
def test_two_runs_give_the_same_bits(policy):
    arguments = long_inputs(20000, Hkv=2, G=4, **POLICIES[policy])
    assert_same(dispatch.route(*arguments), dispatch.route(*arguments))


@pytest.mark.parametrize("policy", POLICIES)
def test_no_synchronisation_and_a_graph_replays(policy):
    arguments = long_inputs(8192, **POLICIES[policy])
    want = dispatch.route(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # refuses a synchronisation
        got = dispatch.route(*arguments)
    graph.replay()
    torch.cuda.synchronize()
    assert_same(got, want)


@pytest.mark.parametrize("policy", ["hybrid", *POLICIES])
def test_no_map_beside_the_index_buffer(policy):
    # Nq is 2048: a map of fp32 takes as much as the lists, and more than anything else here
    L, Hq = 131072, 32
    query = torch.randn(1, Hq, L, 64, device="cuda", dtype=torch.bfloat16)
    key = torch.randn(1, 8, L, 64, device="cuda", dtype=torch.bfloat16)
    settings = params(64, (64, 64), **POLICIES.get(policy, {"policy": policy}))
    dispatch.route(query, key, None, settings)  # compiles
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = dispatch.route(query, key, None, settings)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    results = sum(x.nbytes for x in result)
    assert peak < results + Hq * (L // 64) ** 2 * 4
