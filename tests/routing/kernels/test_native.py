"""The kernels on the GPU against the eager reference there: dtypes, head dims, groups, lengths."""

import pytest
import torch

from tests.routing.inputs import key_mask, long_structured, params, structured

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

if torch.cuda.is_available():
    from crisp_flex.routing.kernels import route as kernels
    from tests.routing.kernels.compare import check_masses, check_route

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def inputs(L, D=128, *, B=1, Hkv=2, G=2, Lkv=None, mask="none", dtype=torch.bfloat16, **changes):
    """query, key, key_valid and params on the GPU; block= among the changes."""
    Lkv = Lkv or L
    block = changes.pop("block", (128, 128))
    query, key = structured(B, Hkv * G, Hkv, L, Lkv, D, dtype=dtype)
    key_valid = key_mask(mask, B, Lkv)
    return (
        query.cuda(), key.cuda(), None if key_valid is None else key_valid.cuda(),
        params(D, block, policy="hybrid", **changes),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("L", [1000, 1024])
def test_head_dims(D, L, dtype):
    arguments = inputs(L, D, dtype=DTYPES[dtype])
    check_masses(*arguments)
    check_route(*arguments)


@pytest.mark.parametrize("G", [1, 3, 4, 7, 8])
@pytest.mark.parametrize("block", [(128, 128), (64, 64)], ids=str)
def test_groups(G, block):
    arguments = inputs(1000, G=G, B=3, Hkv=1, block=block)
    check_masses(*arguments)
    check_route(*arguments)


@pytest.mark.parametrize("L", [1, 100, 128, 129])
def test_lengths(L):
    check_route(*inputs(L, dense_last_blocks=0))


@pytest.mark.parametrize("L", [4096, 5000])
@pytest.mark.parametrize("block", [(128, 128), (64, 64), (128, 64), (64, 128)], ids=str)
@pytest.mark.parametrize("reduce", ["mean", "min"])
def test_longer_lengths_and_block_sizes(L, block, reduce):
    arguments = long_inputs(L, block=block, coverage=0.8, coverage_reduce=reduce)
    check_masses(*arguments)
    check_route(*arguments)


@pytest.mark.parametrize("mask", ["left", "right", "holes", "all false in the first"])
@pytest.mark.parametrize("block", [(128, 128), (64, 64)], ids=str)
def test_key_masks(mask, block):
    arguments = inputs(1000, B=3, mask=mask, block=block)
    check_masses(*arguments)
    check_route(*arguments)


@pytest.mark.parametrize("Lq", [384, 300])
def test_a_chunk(Lq):
    check_route(*inputs(Lq, Lkv=1200))


def long_inputs(L, *, D=128, Hkv=1, G=2, block=(128, 128), policy="hybrid", **changes):
    """As inputs, made on the GPU for lengths beyond those that structured takes."""
    query, key = long_structured(L, D, Hkv=Hkv, G=G, device="cuda")
    settings = params(D, block, policy=policy, **changes)
    return query.bfloat16(), key.bfloat16(), None, settings


def test_a_long_ragged_prompt():
    arguments = long_inputs(131072 + 37, coverage=0.7)
    check_masses(*arguments)
    kept = check_route(*arguments)
    assert (kept > 0).float().mean() < 0.45  # half of them are visible


def test_any_strides():
    query, key, _, settings = long_inputs(3000)
    other_order = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key)]
    every_second = [x.repeat_interleave(2, -1)[..., ::2] for x in (query, key)]
    for changed in (other_order, every_second):
        check_masses(*changed, None, settings)
        check_route(*changed, None, settings)


def test_two_runs_give_the_same_bits():
    arguments = long_inputs(20000, Hkv=2, G=4)
    assert_same(kernels.route(*arguments), kernels.route(*arguments))


def assert_same(got, want):
    """Counts and statistics bit by bit, and the listed blocks; unused slots are undefined."""
    for i in (0, 2, 3):
        assert torch.equal(got[i], want[i])
    P = want[1].shape[3] - want[1].shape[2]  # as many key as query blocks
    for lists, counts in ((slice(0, P), want[0]), (slice(P, None), want[2])):
        used = torch.arange(want[1][..., lists].shape[3], device="cuda") < counts[..., None]
        assert torch.equal(got[1][..., lists][used], want[1][..., lists][used])


def test_no_synchronisation_and_a_graph_replays():
    query, key, _, settings = long_inputs(8192)
    want = kernels.route(query, key, None, settings)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # refuses a synchronisation
        got = kernels.route(query, key, None, settings)
    graph.replay()
    torch.cuda.synchronize()
    assert_same(got, want)


def test_offsets_beyond_int32():
    # the last head starts past element 2**31
    L, D, H = 8192, 128, 2
    stride = 1 << 31
    memory = torch.empty(stride + L * D, dtype=torch.bfloat16, device="cuda")
    query, key, _, settings = long_inputs(L, Hkv=H, G=1)
    far = memory.as_strided((1, H, L, D), (0, stride, D, 1))
    far.copy_(key)
    check_masses(query, far, None, settings)
    check_route(query, far, None, settings)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_launches_go_to_the_device_of_the_query():
    query, key, _, settings = long_inputs(3000)
    want = kernels.route(query, key, None, settings)
    got = kernels.route(query.to("cuda:1"), key.to("cuda:1"), None, settings)
    assert_same([x.to("cuda:0") for x in got], want)
