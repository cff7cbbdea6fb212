"""Lengths, heads, dtypes and values that people have: B05, B10, B18, B33, B35."""

import pytest
import torch
from masked_attention import relative_error

import crisp_flex
from crisp_flex import CrispConfig
from tests.cases.peaky import CONFIG, LENGTH, Sdpa, dense, qkv

L = LENGTH


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


def rewritten(model):
    return [len(report.rewritten) for report in crisp_flex.reports(model)]


@pytest.mark.slow
def test_b05_every_length_is_right_to_its_last_row():
    model = crisp_flex.compile(Sdpa(is_causal=True), CONFIG, dynamic=True)
    for n in (L, L - 1, L + 1, L + 31, L + 63, L + 64, L + 65):
        q, k, v = qkv(Lq=n, columns=(0.0, 0.37, 1.0))
        got, want = model(q, k, v), dense(q, k, v, is_causal=True)
        assert got.isfinite().all()
        assert relative_error(got, want) < 1e-2, n
        assert relative_error(got[:, :, -1], want[:, :, -1]) < 1e-2, n
        poisoned = v.clone()
        poisoned[:, :, -1] = 1e4
        assert torch.equal(model(q, k, poisoned)[:, :, :-1], got[:, :, :-1]), n
    assert rewritten(model) == [1]


@pytest.mark.slow
@pytest.mark.parametrize(("Hq", "Hkv"), [(14, 2), (15, 5), (7, 1)])
def test_b10_any_ratio_of_heads(Hq, Hkv):
    q, k, v = qkv(Hq=Hq, Hkv=Hkv)
    model = crisp_flex.compile(Sdpa(is_causal=True, enable_gqa=True), CONFIG)
    assert relative_error(model(q, k, v), dense(q, k, v, is_causal=True)) < 1e-2
    assert rewritten(model) == [1]
    decode = crisp_flex.compile(Sdpa(enable_gqa=True), CONFIG)
    last = q[:, :, -1:]
    assert relative_error(decode(last, k, v), dense(last, k, v)) < 1e-5
    assert rewritten(decode) == [0]


@pytest.mark.slow
def test_b18_every_batch_row_and_head_is_as_if_alone():
    cells = [
        [qkv(Hq=1, columns=(0.0, 0.1 + 0.25 * b + 0.06 * h), seed=4 * b + h) for h in range(4)]
        for b in range(3)
    ]
    q, k, v = (
        torch.cat([torch.cat([cell[i] for cell in row], 1) for row in cells]) for i in range(3)
    )
    got = crisp_flex.compile(Sdpa(is_causal=True), CONFIG)(q, k, v)
    for b, row in enumerate(cells):
        for h, cell in enumerate(row):
            want = dense(*cell, is_causal=True)
            assert relative_error(got[b : b + 1, h : h + 1], want) < 1e-2, (b, h)


@pytest.mark.slow
def test_b33_autocast_gives_what_sdpa_gives():
    q, k, v = qkv()
    model = crisp_flex.compile(Sdpa(is_causal=True), CONFIG)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = model(q, k, v.bfloat16())
        want = dense(q, k, v.bfloat16(), is_causal=True)
    assert got.dtype == want.dtype
    assert relative_error(got, want) < 1e-2
    assert rewritten(model) == [1]
    alone = crisp_flex.compile(Sdpa(is_causal=True), CONFIG)
    got = alone(q, k, v)
    assert got.dtype == torch.float32
    assert relative_error(got, dense(q, k, v, is_causal=True)) < 1e-2
    assert rewritten(alone) == [1]


@pytest.mark.slow
@pytest.mark.parametrize(("D", "Dv"), [(48, 32), (16, 32), (288, 256)])
def test_b35_the_width_of_the_result_is_that_of_value(D, Dv):
    q, k, v = qkv(D=D, Dv=Dv)
    got = crisp_flex.compile(Sdpa(is_causal=True), CONFIG)(q, k, v)
    assert got.shape[-1] == Dv
    assert relative_error(got, dense(q, k, v, is_causal=True)) < 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("slice_of", [True, False], ids=["a slice of the key", "the key itself"])
def test_b35_value_may_share_the_storage_of_key(slice_of):
    q, k, _ = qkv(D=48)
    v = k[..., :32] if slice_of else k
    config = CrispConfig(min_seqlen=256, block_size=(64, 64), policy="dense")
    model = crisp_flex.compile(Sdpa(is_causal=True), config)
    assert relative_error(model(q, k, v), dense(q, k, v, is_causal=True)) < 1e-5
    assert rewritten(model) == [1]
