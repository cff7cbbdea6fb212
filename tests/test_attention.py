"""The routing as plain functions: a BlockMask, and attention over it."""

import pytest
import torch
from graphs import causal
from masked_attention import kept_blocks, masked_attention, relative_error

import crisp_flex
from crisp_flex import CrispConfig, InputError

SPARSE = CrispConfig(
    min_seqlen=128, policy="streaming", streaming_blocks=1, dense_last_blocks=0, max_uncovered=1.0
)


def kept(block_mask, Nkv):
    return kept_blocks(
        block_mask.kv_num_blocks,
        block_mask.kv_indices,
        block_mask.full_kv_num_blocks,
        block_mask.full_kv_indices,
        Nkv,
    )


def test_route_gives_the_lists_that_sparse_attention_uses(qkv):
    q, k, v = qkv(Lq=640, D=32)
    block_mask = crisp_flex.route(q, k, SPARSE)
    assert block_mask.shape == (1, 4, 640, 640)
    assert block_mask.kv_indices.stride() == block_mask.full_kv_indices.stride()
    got = crisp_flex.sparse_attention(q, k, v, config=SPARSE)
    assert relative_error(got, masked_attention(q, k, v, kept(block_mask, 5))) < 2e-6
    assert relative_error(got, causal(q, k, v)) > 0.1


def test_a_policy_that_reads_the_values_is_given_them(qkv):
    q, k, v = qkv(Lq=640, D=32)
    v = v + 4 * torch.randn(4, 32).repeat_interleave(160, 0)  # so that some blocks matter
    config = CrispConfig(min_seqlen=128, policy="bounded", max_error=0.5)
    keep = kept(crisp_flex.route(q, k, config, value=v), 5)
    assert 0 < keep.sum() < 60
    got = crisp_flex.sparse_attention(q, k, v, config=config)
    assert relative_error(got, masked_attention(q, k, v, keep)) < 2e-6


def test_a_chunk_after_a_cache_is_aligned_to_the_last_key(qkv):
    q, k, v = qkv(B=2, Lq=300, Lkv=900, D=32)
    valid = torch.ones(2, 900, dtype=torch.bool)
    valid[1, :130] = False
    keep = kept(crisp_flex.route(q, k, SPARSE, key_valid=valid), 8)
    got = crisp_flex.sparse_attention(q, k, v, config=SPARSE, key_valid=valid)
    assert relative_error(got, masked_attention(q, k, v, keep, key_valid=valid)) < 2e-6


@pytest.mark.parametrize("padded", [False, True])
def test_a_short_call_is_dense(qkv, padded):
    q, k, v = qkv(Lq=100, Lkv=150, D=32)
    valid = torch.arange(150)[None] >= 20 if padded else None
    got = crisp_flex.sparse_attention(q, k, v, config=SPARSE, key_valid=valid)
    everything = torch.ones(1, 4, 1, 2, dtype=torch.bool)
    assert relative_error(got, masked_attention(q, k, v, everything, key_valid=valid)) < 2e-6


WRONG = {
    "must be \\[B, H, L, D\\]": lambda q, k, v: (q[0], k, v, None),
    "must share float32, float16 or bfloat16": lambda q, k, v: (q.double(), k, v, None),
    "must be on one device": lambda q, k, v: (q, k.to("meta"), v, None),
    "do not match": lambda q, k, v: (q, k[..., :16], v, None),
    "multiple of the key heads": lambda q, k, v: (q[:, :3], k, v, None),
    "query has no tokens": lambda q, k, v: (q[:, :, :0], k, v, None),
    "Lkv must be at least Lq": lambda q, k, v: (q, k[:, :, :9], v[:, :, :9], None),
    "key_valid must be": lambda q, k, v: (q, k, v, torch.ones(1, 9, dtype=torch.bool)),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_inputs_are_named(qkv, message):
    q, k, v, valid = WRONG[message](*qkv(Lq=200, D=32))
    with pytest.raises(InputError, match=message):
        crisp_flex.sparse_attention(q, k, v, key_valid=valid)


def test_many_kinds_of_calls_stay_sparse(qkv):
    """Past Dynamo's limit of recompilations flex_attention would ignore the block lists."""
    with torch._dynamo.config.patch(recompile_limit=1):
        for D in (16, 32, 64):
            q, k, v = qkv(Lq=640, D=D)
            got = crisp_flex.sparse_attention(q, k, v, config=SPARSE)
            assert relative_error(got, causal(q, k, v)) > 0.1, D
