"""Values and lengths at the edge: NaN, Inf, equal keys, zero queries, one token, empty batch.

Dense attention gives NaN to a row with a NaN query or a visible NaN key, and to no other: so do we,
since what is not known is kept. The reference decides here; Triton's kernels must agree with it.
"""

import pytest
import torch
from masked_attention import masked_attention
from routed_blocks import routed_blocks

import crisp_flex
from crisp_flex import CrispConfig
from crisp_flex.routing.params import RouteParams
from crisp_flex.routing.reference import route
from tests.cases.peaky import dense, qkv

BLOCK = (16, 16)
L = 200
POLICIES = {
    "hybrid": {"policy": "hybrid", "coverage": 0.8},
    "hybrid min": {"policy": "hybrid", "coverage": 0.8, "coverage_reduce": "min"},
    "crisp": {"policy": "crisp"},
    "crisp pe": {"policy": "crisp", "router": "pe", "max_uncovered": 1.0},
    "dense": {"policy": "dense"},
}
policies = pytest.mark.parametrize("policy", POLICIES)


def sparse(q, k, v, **changes):
    """Attention over the kept blocks in fp32, without a compiler."""
    config = CrispConfig(block_size=BLOCK, **changes)
    return masked_by(q, k, v, routed_blocks(q, k, config))


def masked_by(q, k, v, keep):
    """As masked_attention, but a NaN of softmax stays where it comes from NaN or Inf."""
    out = masked_attention(q, k, v, keep, BLOCK)
    G = q.shape[1] // k.shape[1]
    spoiled = ~k.isfinite().all(-1).repeat_interleave(G, 1)  # [B, Hq, L]
    row_keeps = keep.repeat_interleave(BLOCK[0], 2)[:, :, : q.shape[2]]
    pairs = row_keeps.repeat_interleave(BLOCK[1], 3)[..., : k.shape[2]]
    pairs = pairs & torch.ones(q.shape[2], k.shape[2]).tril().bool()
    unknown = (pairs & spoiled[:, :, None]).any(-1) | ~q.isfinite().all(-1)
    return out.masked_fill(unknown[..., None], torch.nan)


@policies
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_key_that_is_not_finite_is_kept_by_every_row_that_sees_it(policy, bad):
    q, k, v = qkv(B=2, Hq=4, Hkv=2, Lq=L, D=16)
    k[0, 1, 101, 3] = bad
    got = sparse(q, k, v, **POLICIES[policy])
    assert got[0, 2:, 101:].isnan().all()
    assert got[0, :, :101].isfinite().all()
    assert got[0, :2].isfinite().all()
    assert got[1].isfinite().all()


@policies
@pytest.mark.parametrize("at", [5, 77, L - 1])
def test_a_query_of_nan_spoils_no_other_row(policy, at):
    q, k, v = qkv(B=2, Hq=4, Hkv=2, Lq=L, D=16)
    q[0, 1, at] = torch.nan
    got = sparse(q, k, v, **POLICIES[policy])
    others = torch.arange(L) != at
    assert got[0, 1, at].isnan().all()
    assert got[0, 1, others].isfinite().all()
    clean = sparse(q.nan_to_num(0.0), k, v, **POLICIES[policy])
    assert torch.equal(got[1], clean[1])
    assert torch.equal(got[0, 2:], clean[0, 2:])


@pytest.mark.parametrize("policy", ["hybrid", "crisp pe"])
def test_the_block_of_a_query_of_nan_keeps_all_it_sees(policy):
    q, k, _ = qkv(Hq=1, Lq=400, D=16, columns=(0.0,))
    k[:, :, 40, 0] += 12
    q[:, :, 160:176, 0] += 24  # neither audited nor among the proxies
    config = CrispConfig(block_size=BLOCK, **POLICIES[policy])
    assert not routed_blocks(q, k, config)[0, 0, 10, :11].all()
    q[0, 0, 165] = torch.nan
    assert routed_blocks(q, k, config)[0, 0, 10, :11].all()


@policies
def test_statistics_are_numbers_whatever_comes_in(policy):
    q, k, _ = qkv(Lq=L, D=16)
    k[0, 0, 20], q[0, 1, -1] = torch.nan, torch.inf
    config = CrispConfig(block_size=BLOCK, **POLICIES[policy])
    *_, stats = route(q, k, None, RouteParams.from_config(config, D=16))
    assert stats.isfinite().all()


@policies
@pytest.mark.parametrize("what", ["equal keys", "zero queries", "zero keys", "huge"])
def test_flat_and_huge_logits(policy, what):
    q, k, v = qkv(Lq=L, D=16)
    if what == "equal keys":
        k = k[:, :, :1].expand_as(k)
    if what == "zero queries":
        q = torch.zeros_like(q)
    if what == "zero keys":
        k = torch.zeros_like(k)
    if what == "huge":
        q, k = (x.clamp(-100, 100).half() * 300 for x in (q, k))  # |q k^T| overflows fp16
    got = sparse(q, k, v, **POLICIES[policy])
    assert got.isfinite().all()
    if what == "huge":
        want = dense(q.float(), k.float(), v, is_causal=True)
        assert (got[:, :, -16:] - want[:, :, -16:]).norm() < 1e-2 * want[:, :, -16:].norm()


@policies
@pytest.mark.parametrize("sink", [0, 1, 40, None])
def test_sinks_elsewhere_or_nowhere(policy, sink):
    q, k, v = qkv(Lq=L, D=16, columns=() if sink is None else (sink / (L - 1),))
    got = sparse(q, k, v, **POLICIES[policy])
    assert got.isfinite().all()
    if sink is not None:
        want = dense(q, k, v, is_causal=True)
        assert (got - want).norm() < 2e-2 * want.norm()


@policies
def test_every_length_up_to_300(policy):
    q, k, _ = qkv(Hq=2, Hkv=1, Lq=300, D=16)
    config = CrispConfig(block_size=BLOCK, **POLICIES[policy])
    for n in (*range(1, 36), 47, 48, 49, 63, 64, 65, 127, 128, 129, 255, 256, 257, 299, 300):
        keep = routed_blocks(q[:, :, :n], k[:, :, :n], config)
        blocks = torch.arange(-(-n // 16))
        assert keep.shape == (1, 2, len(blocks), len(blocks)), n
        assert keep[..., blocks, blocks].all(), n
        assert not keep.triu(1).any(), n


@policies
def test_one_token_and_an_empty_batch(policy):
    q, k, v = qkv(Lq=1, D=16)
    config = CrispConfig(block_size=BLOCK, min_seqlen=1, **POLICIES[policy])
    assert torch.equal(sparse(q, k, v, **POLICIES[policy]), v)
    lists = crisp_flex.route(*(x[:0] for x in qkv(Lq=L, D=16)[:2]), config)
    assert lists.kv_num_blocks.shape == (0, 4, -(-L // 16))
