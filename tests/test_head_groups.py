"""How many head groups: the index table of one is at most a tenth of the layer's K and V."""

import pytest
import torch
from masked_attention import masked_attention, relative_error
from routed_blocks import routed_blocks

import crisp_flex
from crisp_flex import CrispConfig, head_groups
from crisp_flex.routing import ops
from crisp_flex.routing.params import RouteParams

K = 1024
LLAMA = {"Hq": 32, "Hkv": 8, "D": 128}
QWEN = {"Hq": 14, "Hkv": 2, "D": 64}
GEMMA = {"Hq": 16, "Hkv": 4, "D": 256}
MHA = {"Hq": 32, "Hkv": 32, "D": 128}


def arguments(heads, L, *, block_size=(128, 128), has_key_valid=False, element_bytes=2):
    return {
        **heads,
        "Dv": heads["D"],
        "element_bytes": element_bytes,
        "Lq": L,
        "Lkv": L,
        "block_size": block_size,
        "has_key_valid": has_key_valid,
    }


@pytest.mark.parametrize(
    ("heads", "L", "count"),
    [
        (LLAMA, 64 * K, 1),
        (LLAMA, 64 * K + 1, 2),
        (LLAMA, 128 * K, 4),
        (LLAMA, 256 * K, 8),
        (LLAMA, 512 * K, 16),
        (LLAMA, 1024 * K, 32),
        (LLAMA, 4096 * K, 32),  # one query head a group, and 1.2 times K and V each
        (QWEN, 64 * K, 1),
        (QWEN, 128 * K, 14),
        (GEMMA, 128 * K, 2),
        (GEMMA, 512 * K, 8),
        (MHA, 128 * K, 1),
        (MHA, 512 * K, 4),
    ],
)
def test_the_count_at_known_lengths(heads, L, count):
    assert head_groups.count_groups(**arguments(heads, L)) == count


def test_more_blocks_and_padding_take_more_groups():
    assert head_groups.count_groups(**arguments(GEMMA, 128 * K, block_size=(128, 64))) == 4
    assert head_groups.count_groups(**arguments(LLAMA, 128 * K, has_key_valid=True)) == 8
    assert head_groups.count_groups(**arguments(LLAMA, 128 * K, element_bytes=4)) == 2


@pytest.mark.parametrize("heads", [LLAMA, QWEN, GEMMA, MHA, {"Hq": 9, "Hkv": 3, "D": 64}])
@pytest.mark.parametrize("L", [70 * K, 131 * K + 37, 512 * K])
def test_the_table_of_a_group_is_a_tenth_of_k_and_v_and_a_smaller_count_would_not_do(heads, L):
    count = head_groups.count_groups(**arguments(heads, L))
    kv_bytes = 2 * heads["Hkv"] * L * heads["D"] * 2
    groups = head_groups.split_heads(count, Hq=heads["Hq"], Hkv=heads["Hkv"])

    def share(number):
        each = heads["Hq"] // number
        blocks = -(-L // 128)
        return 4 * each * blocks * (blocks + 1) / kv_bytes

    assert len(groups) == count
    assert share(count) <= 0.1 or count == heads["Hq"]
    smaller = [n for n in range(1, count) if heads["Hkv"] % n == 0]
    smaller += [n for n in range(heads["Hkv"], count, heads["Hkv"]) if heads["Hq"] % n == 0]
    assert all(share(n) > 0.1 for n in smaller)


@pytest.mark.parametrize(("Hq", "Hkv"), [(32, 8), (14, 2), (9, 3), (5, 5), (8, 1)])
def test_groups_hold_each_query_head_once_with_its_key_head(Hq, Hkv):
    G = Hq // Hkv
    for count in {n for n in range(1, Hq + 1) if Hkv % n == 0 or (n % Hkv == 0 and Hq % n == 0)}:
        groups = head_groups.split_heads(count, Hq=Hq, Hkv=Hkv)
        assert len(groups) == count
        seen = []
        for group in groups:
            heads = range(group.q_start, group.q_end)
            part = len(heads) // (group.kv_end - group.kv_start)
            # flex_attention takes query head h of the group to its key head h // part
            for at, head in enumerate(heads):
                assert group.kv_start + at // part == head // G
            seen += heads
        assert seen == list(range(Hq))


def test_the_arithmetic_is_the_size_of_the_ops_buffer():
    q, k = torch.randn(1, 6, 300, 16), torch.randn(1, 2, 300, 16)
    for block_size in [(128, 128), (128, 64)]:
        params = RouteParams.from_config(CrispConfig(block_size=block_size), D=16)
        for valid in (None, torch.ones(1, 300, dtype=torch.bool)):
            buffer = ops.route(q, k, valid, params)[1]
            assert buffer.nbytes == head_groups.table_bytes(
                6, Lq=300, Lkv=300, block_size=block_size, has_key_valid=valid is not None
            )


def test_the_cpu_takes_one_group():
    q, k = torch.empty(1, 32, 300_000, 1), torch.empty(1, 8, 300_000, 1)
    settings = {"block_size": (128, 128), "has_key_valid": False}
    assert head_groups.count_groups_of(q, k, k, **settings) == 1


def test_route_after_is_route_and_both_ops_keep_their_contract(qkv):
    q, k, v = qkv(Lq=300, D=32)
    out = torch.zeros(1, 4, 300, 32)
    for policy, value in (("hybrid", None), ("bounded", v)):
        args = RouteParams.from_config(CrispConfig(policy=policy), D=32).as_args()
        for mine, want in zip(
            torch.ops.crisp_flex.route_after(out, q, k, None, *args, value=value),
            torch.ops.crisp_flex.route(q, k, None, *args, value=value),
            strict=True,
        ):
            torch.testing.assert_close(mine, want, equal_nan=True)
    torch.ops.crisp_flex.write_heads(out, q[:, 1:3], 2)
    assert torch.equal(out[:, 2:], q[:, 1:3])
    assert not out[:, :2].any()
    torch.library.opcheck(torch.ops.crisp_flex.write_heads.default, (out, q[:, 1:3], 2))


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("padded", [False, True])
def test_the_eager_api_in_groups(count, padded, qkv, monkeypatch):
    config = CrispConfig(
        min_seqlen=128, policy="streaming", streaming_blocks=1, dense_last_blocks=0,
        max_uncovered=1.0,
    )  # fmt: skip
    monkeypatch.setattr(head_groups, "count_groups_of", lambda *args, **kwargs: count)
    q, k, v = qkv(B=2, Lq=400, Lkv=500, D=32)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    valid = torch.ones(2, 500, dtype=torch.bool) if padded else None
    if padded:
        valid[0, :200] = False
    got = crisp_flex.sparse_attention(q, k, v, config=config, key_valid=valid)
    keep = routed_blocks(q, k, config, valid)
    assert relative_error(got, masked_attention(q, k, v, keep, key_valid=valid)) < 2e-6
    assert got.stride() == q.stride()
