"""route and select_blocks: other policies against the oracle, and what holds for all."""

import pytest
import torch
from masked_attention import kept_blocks

from crisp_flex.routing.geometry import partial_slots
from crisp_flex.routing.params import STAT_NAMES
from crisp_flex.routing.reference import route, select_blocks
from tests.routing.inputs import SHAPES, case, key_mask, params, structured
from tests.routing.oracle import check
from tests.routing.scene import mask_of

POLICIES = {
    "hybrid": {"policy": "hybrid", "coverage": 0.8},
    "crisp": {"policy": "crisp", "max_uncovered": 1.0, "k_min": 2},
    "crisp jsd": {"policy": "crisp", "router": "jsd", "max_uncovered": 1.0, "k_min": 2},
    "crisp pe": {"policy": "crisp", "router": "pe", "gamma": 0.7, "max_uncovered": 1.0},
    "streaming": {"policy": "streaming", "streaming_blocks": 2, "max_uncovered": 1.0},
    "dense": {"policy": "dense"},
    "flexprefill": {"policy": "flexprefill", "gamma": 0.5, "min_budget": 64},
    "minference": {"policy": "minference", "vertical_tokens": 64, "slash_tokens": 64},
    "xattention": {"policy": "xattention", "threshold": 0.5, "stride": 8},
    "oracle": {"policy": "oracle", "coverage": 0.6},
}
policies = pytest.mark.parametrize("policy", POLICIES)
shapes = pytest.mark.parametrize("name", SHAPES)


@shapes
def test_streaming_equals_the_brute_force(name):
    for changes in ({"max_uncovered": 1.0, "dense_last_blocks": 0}, {"max_uncovered": 0.3}):
        inputs = case(name, policy="streaming", streaming_blocks=2, **changes)
        check(select_blocks(*inputs), *inputs)


@shapes
def test_dense_keeps_all_that_is_visible(name):
    inputs = case(name, policy="dense")
    check(select_blocks(*inputs), *inputs)


@policies
@shapes
def test_lists_are_the_kept_blocks(name, policy):
    query, key, key_valid, p = case(name, **POLICIES[policy])
    keep = select_blocks(query, key, key_valid, p).keep
    num, buffer, full_num, stats = route(query, key, key_valid, p)
    B, Hq, Nq, Nkv = keep.shape
    Lq, Lkv = query.shape[2], key.shape[2]
    P = partial_slots(p.block_q, p.block_kv, Lq, Lkv, key_valid is not None)
    assert buffer.shape == (B, Hq, Nq, P + Nkv)
    assert stats.shape == (B, Hq, len(STAT_NAMES))
    assert not stats.isnan().any()
    assert num.is_contiguous()
    assert full_num.is_contiguous()
    for b in range(B):
        valid = torch.ones(Lkv).bool() if key_valid is None else key_valid[b]
        pairs = mask_of(Lq, Lkv, valid.numpy())
        tiles = [
            [pairs[i : i + p.block_q, j : j + p.block_kv] for j in range(0, Lkv, p.block_kv)]
            for i in range(0, Lq, p.block_q)
        ]
        some = torch.tensor([[t.any() for t in row] for row in tiles])
        every = torch.tensor([[t.all() for t in row] for row in tiles])
        diagonal = (torch.arange(1, Nq + 1) * p.block_q).clamp(max=Lq) - 1 + Lkv - Lq
        for h in range(Hq):
            assert not (keep[b, h] & ~some).any(), "a block with nothing visible is listed"
            assert torch.equal(keep[b, h].any(-1), some.any(-1)), "a row is empty"
            for I in range(Nq):
                partial = buffer[b, h, I, : num[b, h, I]].tolist()
                full = buffer[b, h, I, P : P + full_num[b, h, I]].tolist()
                assert partial == (keep[b, h, I] & ~every[I]).nonzero().flatten().tolist()
                assert full == (keep[b, h, I] & every[I]).nonzero().flatten().tolist()
                J = diagonal[I] // p.block_kv
                assert keep[b, h, I, J] == some[I, J]


@policies
@pytest.mark.parametrize("block", [(128, 128), (64, 64), (128, 64)], ids=str)
@pytest.mark.parametrize("Lkv", [640, 700])
def test_padding_by_whole_blocks_shifts_the_blocks(policy, block, Lkv):
    query, key = structured(2, 4, 2, 640, Lkv, seed=4)
    p = params(block=block, **POLICIES[policy])
    alone = select_blocks(query, key, None, p)
    # in a chunk (Lkv > Lq) the padding lies among the keys before it
    query_pad = 256 if Lkv == 640 else 0
    query = torch.cat([torch.full_like(query[:, :, :query_pad], torch.nan), query], 2)
    key = torch.cat([torch.full_like(key[:, :, :256], torch.nan), key], 2)
    key_valid = (torch.arange(Lkv + 256) >= 256).expand(2, -1)
    padded = select_blocks(query, key, key_valid, p)
    past = padded.keep[:, :, query_pad // block[0] :, 256 // block[1] :]
    assert torch.equal(past, alone.keep)
    assert padded.keep.sum() == alone.keep.sum()
    torch.testing.assert_close(padded.stats, alone.stats, atol=5e-6, rtol=0)


@policies
def test_each_sequence_is_routed_as_if_alone(policy):
    query, key, key_valid, p = case("left padding", **POLICIES[policy])
    both = select_blocks(query, key, key_valid, p)
    for b in range(2):
        one = select_blocks(query[b : b + 1], key[b : b + 1], key_valid[b : b + 1], p)
        assert torch.equal(one.keep[0], both.keep[b])


@policies
def test_an_all_true_mask_is_no_mask(policy):
    query, key, _, p = case("ragged chunk", **POLICIES[policy])
    mask = torch.ones(1, key.shape[2], dtype=torch.bool)
    bare, masked = (select_blocks(query, key, m, p) for m in (None, mask))
    assert torch.equal(bare.keep, masked.keep)
    torch.testing.assert_close(bare.stats, masked.stats, atol=5e-6, rtol=0)


@policies
def test_hidden_tokens_do_not_matter(policy):
    query, key, key_valid, p = case("holes", **POLICIES[policy])
    before = select_blocks(query, key, key_valid, p)
    key = torch.where(key_valid[:, None, :, None], key, torch.nan)
    after = select_blocks(query, key, key_valid, p)
    assert torch.equal(before.keep, after.keep)
    assert torch.equal(before.stats, after.stats)


@policies
def test_storage_order_and_repetition_do_not_matter(policy):
    query, key, _, p = case("ragged small blocks", **POLICIES[policy])
    first = route(query, key, None, p)
    again = route(query, key, None, p)
    q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key))
    transposed = route(q, k, None, p)
    for a, b, c in zip(first, again, transposed, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


@policies
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_inputs_are_computed_in_fp32(policy, dtype):
    query, key, _, p = case("ragged small blocks", dtype=dtype, **POLICIES[policy])
    low = select_blocks(query, key, None, p)
    same_values = select_blocks(query.float(), key.float(), None, p)
    assert torch.equal(low.keep, same_values.keep)
    assert low.stats.dtype == torch.float32
    torch.testing.assert_close(low.stats, same_values.stats, atol=5e-6, rtol=0)


@pytest.mark.parametrize("count", [0, 1, 3, 99])
def test_the_last_query_blocks_are_dense(count):
    query, key, _, p = case(
        "long and ragged", policy="streaming", streaming_blocks=1, max_uncovered=1.0,
        dense_last_blocks=count,
    )  # fmt: skip
    keep = select_blocks(query, key, None, p).keep
    dense_rows = keep.sum(-1)[0, 0] == torch.arange(1, 9)
    # rows of three blocks or fewer are dense by their column and two diagonals
    assert dense_rows.tolist() == [I < 3 or count > 7 - I for I in range(8)]


@policies
def test_policies_are_sparse_but_dense(policy):
    query, key, _, p = case("ragged small blocks", **POLICIES[policy])
    stats = select_blocks(query, key, None, p).stats
    assert (stats[..., 0].sum() < stats[..., 1].sum()) == (policy != "dense")


def test_unknown_policy_is_refused():
    with pytest.raises(ValueError, match=r"policy must be one of .* got 'random'"):
        select_blocks(*case("one token", policy="random"))


@policies
@pytest.mark.parametrize("mask", ["none", "left"])
@pytest.mark.parametrize("block", [(128, 128), (64, 64), (128, 64)], ids=str)
@pytest.mark.parametrize(("Lq", "q_offset", "Lkv"), [(384, 0, 640), (300, 129, 700), (1, 63, 128)])
def test_an_offset_in_a_tensor_selects_as_the_filled_part_of_the_cache_does(
    policy, mask, block, Lq, q_offset, Lkv
):
    query, key = structured(2, 4, 2, Lq, Lkv, seed=4)
    key[:, :, q_offset + Lq :] = 1e4  # what stands in the rest of the cache must not matter
    filled = q_offset + Lq
    p = params(block=block, **POLICIES[policy])
    valid = key_mask(mask, 2, filled)
    padded = None if valid is None else torch.nn.functional.pad(valid, (0, Lkv - filled))
    want = select_blocks(query, key[:, :, :filled], valid, p)
    got = select_blocks(query, key, padded, p, torch.tensor([q_offset], dtype=torch.int32))
    width = want.keep.shape[-1]
    assert torch.equal(got.keep[..., :width], want.keep)
    assert not got.keep[..., width:].any()
    torch.testing.assert_close(got.stats, want.stats, atol=1e-5, rtol=1e-5)
    lists = route(query, key, padded, p, torch.tensor([q_offset], dtype=torch.int32))
    Nkv = -(-Lkv // p.block_kv)
    listed = kept_blocks(
        lists[0], lists[1][..., :Nkv], lists[2], lists[1][..., lists[1].shape[3] - Nkv :], Nkv
    )
    assert torch.equal(listed, got.keep)
