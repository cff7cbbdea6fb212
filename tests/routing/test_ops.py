"""The operators' contract: schema, fake strides and dynamic shapes, on odd shapes."""

import pytest
import torch

import crisp_flex
from crisp_flex import CrispConfig
from crisp_flex.config import POLICIES
from crisp_flex.errors import InputError
from crisp_flex.record_audit import kept_mass
from crisp_flex.routing import ops
from crisp_flex.routing.params import STAT_NAMES, RouteParams


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
def test_route_passes_opcheck(policy, dtype, padded):
    q, k = torch.randn(2, 6, 300, 32, dtype=dtype), torch.randn(2, 2, 300, 32, dtype=dtype)
    key_valid = torch.arange(300).expand(2, 300) >= 40 if padded else None
    params = RouteParams.from_config(CrispConfig(policy=policy), D=32)
    value = torch.randn(2, 2, 300, 24, dtype=dtype) if params.reads_values else None
    torch.library.opcheck(
        torch.ops.crisp_flex.route.default, (q, k, key_valid, *params.as_args()), {"value": value}
    )


def test_the_values_reach_the_policy_that_reads_them_and_no_other():
    q, k = torch.randn(1, 2, 300, 16), torch.randn(1, 1, 300, 16)
    seen = []
    for policy in ("bounded", "hybrid"):
        params = RouteParams.from_config(CrispConfig(policy=policy), D=16)
        with ops.watch(lambda call: seen.append(call.value)):
            ops.route(q, k, None, params, value=k)
    assert seen[0] is not None
    assert torch.equal(seen[0], k)
    assert seen[1] is None


def test_a_policy_that_reads_the_values_says_so_where_they_lack():
    q = torch.randn(1, 2, 300, 16)
    config = CrispConfig(policy="bounded")
    with pytest.raises(ValueError, match="policy 'bounded' reads the values: give route value="):
        ops.route(q, q, None, RouteParams.from_config(config, D=16))
    with pytest.raises(InputError, match=r"looks at the values, too: pass value="):
        crisp_flex.route(q, q, config)
    lists = crisp_flex.route(q, q, config, value=q)
    assert lists.kv_num_blocks.shape == (1, 2, 3)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_callers_autocast_changes_nothing(policy):
    """It reaches into an op's implementation: sums of masses in 16 bits, or an overflow."""
    q, k = torch.randn(1, 4, 300, 16), torch.randn(1, 2, 300, 16)
    params = RouteParams.from_config(CrispConfig(policy=policy, block_size=(64, 64)), D=16)
    masses = []

    def run():
        with ops.watch(lambda call: masses.append(kept_mass(call, 3))):
            return ops.route(q, k, None, params, value=k if params.reads_values else None)

    want = run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run()
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    assert torch.equal(*masses)


def test_realize_passes_opcheck():
    x = torch.randn(2, 300, 4, 32).transpose(1, 2)
    torch.library.opcheck(torch.ops.crisp_flex.realize.default, (x,))


@pytest.mark.parametrize("Lkv", [1, 129, 300])
def test_the_buffer_has_room_for_both_lists(Lkv):
    q, k = torch.randn(1, 2, Lkv, 16), torch.randn(1, 1, Lkv, 16)
    params = RouteParams.from_config(CrispConfig(), D=16)
    counts, buffer, full_counts, stats = ops.route(q, k, None, params)
    Nkv = -(-Lkv // 128)
    assert counts.dtype == buffer.dtype == full_counts.dtype == torch.int32
    assert buffer.shape == (1, 2, Nkv, 1 + Nkv)
    assert stats.shape == (1, 2, len(STAT_NAMES))
    assert int(counts.max()) == (Lkv > 1)  # the diagonal, which one token makes full


def test_observers_see_each_call_and_only_while_active():
    q, k = torch.randn(1, 2, 200, 16), torch.randn(1, 1, 200, 16)
    params = RouteParams.from_config(CrispConfig(), D=16)
    seen = []
    with ops.observe(lambda index, counts, *_: seen.append((index, tuple(counts.shape)))):
        ops.route(q, k, None, params)
        ops.route(q, k, None, params)
    ops.route(q, k, None, params)
    assert seen == [(0, (1, 2, 2)), (1, (1, 2, 2))]


@pytest.mark.parametrize("policy", POLICIES)
def test_an_empty_batch_gives_empty_lists(policy):
    q, k = torch.randn(0, 4, 300, 16), torch.randn(0, 2, 300, 16)
    params = RouteParams.from_config(CrispConfig(policy=policy), D=16)
    counts, buffer, _, stats = ops.route(q, k, None, params, value=k)
    assert (counts.shape, buffer.shape, stats.shape) == ((0, 4, 3), (0, 4, 3, 4), (0, 4, 6))
