"""What benchmarks compare with: causal block lists, sampled exact rows, dense paths."""

import pytest
import torch
import torch.nn.functional as F
from masked_attention import masked_attention
from torch.nn.attention.flex_attention import create_block_mask

import crisp_flex
from crisp_flex import CrispConfig
from crisp_flex.flex_hop import causal_mod


@pytest.mark.parametrize("block_kv", [128, 64])
def test_causal_lists_are_those_of_create_block_mask(module_of, block_kv):
    got = module_of("dense").causal_blocks(640, "cpu", block_kv)
    want = create_block_mask(
        causal_mod, None, None, 640, 640, device="cpu", BLOCK_SIZE=(128, block_kv)
    )
    assert torch.equal(got.to_dense(), want.to_dense())
    assert got.kv_indices.stride() == got.full_kv_indices.stride()
    if block_kv == 128:  # with 64, the first of a row's two diagonal blocks is full there
        assert torch.equal(got.full_kv_num_blocks, want.full_kv_num_blocks)


@pytest.mark.parametrize("L", [640, 700])
def test_sampled_rows_are_exact_attention(module_of, qkv, L):
    dense = module_of("dense")
    q, k, v = qkv(Lq=L, D=32)
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    rows = [0, 2, (L - 1) // 128]
    assert dense.relative_error(want, dense.wanted_rows(q, k, v, rows), rows) < 1e-6
    assert dense.relative_error(want + 0.1, dense.wanted_rows(q, k, v, rows), rows) > 0.1


def test_sampled_rows_over_lists_are_the_masked_attention(module_of, qkv):
    dense = module_of("dense")
    q, k, v = qkv(Lq=1024, D=32)
    config = CrispConfig(
        policy="streaming", streaming_blocks=1, max_uncovered=1.0, block_size=(128, 64)
    )
    block_mask = crisp_flex.route(q, k, config)
    rows = [0, 5, 7]
    wanted = dense.wanted_rows(q, k, v, rows, block_mask)
    keep = block_mask.to_dense().bool()
    assert not keep[0, 0, 5, :12].all()  # blocks were dropped
    assert dense.relative_error(masked_attention(q, k, v, keep, (128, 64)), wanted, rows) < 1e-5


def test_a_dense_path_that_is_wrong_is_not_timed(module_of, qkv, capsys):
    dense = module_of("dense")
    q, k, v = qkv(Lq=256, D=32)
    wanted = dense.wanted_rows(q, k, v, [0, 1])
    right = {"right": dense.dense_paths(q, k, v)["sdpa_cpu"]}
    assert dense.dense_times(right, wanted, [0, 1], budget_ms=1)["right_ms"] > 0
    wrong = dense.dense_times({"wrong": lambda: q}, wanted, [0, 1], budget_ms=1)
    assert wrong == {"wrong_ms": None}
    assert "wrong is not timed: relative error" in capsys.readouterr().out

    def absent():
        raise RuntimeError("no kernel for this head dim")

    assert dense.dense_times({"absent": absent}, wanted, [0], budget_ms=1) == {"absent_ms": None}
