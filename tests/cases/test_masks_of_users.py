"""Masks that users pass as tensors or that models build: B03, B04, B11, B27, B30, B36, B38."""

import pytest
import torch
from masked_attention import relative_error

import crisp_flex
from crisp_flex import Reason
from tests.cases.peaky import CONFIG, LENGTH, Sdpa, band, dense, qkv

L = LENGTH


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


def reasons(model):
    sites = [site for report in crisp_flex.reports(model) for site in report.sites]
    return {site.rejection.reason if site.rejection else None for site in sites}


def test_b03_a_padded_batch_whose_mask_is_an_input_stays_dense_and_never_leaks():
    pads = 160
    q, k, v = qkv(B=2, columns=(0.0, pads / (L - 1), 0.71))
    keep = torch.ones(2, L, dtype=torch.bool)
    keep[0, :pads] = False
    mask = keep[:, None, None, :] & band(L)
    model = crisp_flex.compile(Sdpa(), CONFIG)
    got, want = model(q, k, v, attn_mask=mask), dense(q, k, v, attn_mask=mask)
    assert relative_error(got[0, :, pads:], want[0, :, pads:]) < 1e-2
    assert relative_error(got[1], want[1]) < 1e-2
    assert got.isfinite().all()
    assert reasons(model) == {Reason.MASK_IS_INPUT}


def test_b04_the_rows_of_a_tail_are_those_of_the_whole_and_top_left_stays_top_left():
    q, k, v = qkv()
    cut = 3 * L // 4 + 3
    whole = dense(q, k, v, is_causal=True)[:, :, cut:]
    model = crisp_flex.compile(Sdpa(), CONFIG)
    assert relative_error(model(q[:, :, cut:], k, v, attn_mask=band(L - cut, L)), whole) < 1e-2
    top_left = crisp_flex.compile(Sdpa(is_causal=True), CONFIG)
    got = top_left(q[:, :, cut:], k, v)
    assert relative_error(got, dense(q[:, :, cut:], k, v, is_causal=True)) < 1e-2
    assert relative_error(got, whole) > 0.1
    assert reasons(top_left) <= {Reason.LENGTHS_DIFFER, Reason.TOO_SHORT}


def test_b11_a_window_in_an_input_mask_is_kept():
    i = torch.arange(L)
    mask = (i[:, None] >= i) & (i[:, None] - i < L // 16)
    q, k, v = qkv(columns=tuple(x / 32 for x in range(33)))
    model = crisp_flex.compile(Sdpa(), CONFIG)
    assert relative_error(model(q, k, v, attn_mask=mask), dense(q, k, v, attn_mask=mask)) < 1e-2


@pytest.mark.parametrize("additive", [False, True], ids=["bool", "minimum"])
def test_b27_rows_that_see_nothing_are_as_in_eager(additive):
    q, k, v = qkv()
    mask = band(L)
    mask[100:300] = False
    if additive:
        lowest = torch.finfo(torch.float32).min
        mask = torch.zeros(L, L).masked_fill_(~mask, lowest)
    model = crisp_flex.compile(Sdpa(), CONFIG)
    got, want = model(q, k, v, attn_mask=mask), dense(q, k, v, attn_mask=mask)
    assert got.isfinite().all()
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_b30_a_bias_is_never_dropped():
    n = L - 3
    q, k, v = qkv(Lq=n)
    i = torch.arange(n)
    plain = torch.zeros(n, n).masked_fill_(~band(n), float("-inf"))
    bump = plain.clone()
    bump[:, n // 3] += 24.0
    bump.masked_fill_(~band(n), float("-inf"))
    alibi = plain - 0.02 * (i[:, None] - i).clamp_min(0)
    model = crisp_flex.compile(Sdpa(), CONFIG)
    for mask in (plain, alibi, bump, bump[None, None]):
        assert relative_error(model(q, k, v, attn_mask=mask), dense(q, k, v, attn_mask=mask)) < 1e-5
    assert reasons(model) == {Reason.FLOAT_MASK}


def test_b36_a_prefix_that_sees_itself_keeps_its_meaning():
    prefix = L // 4 + 9
    mask = band(L)
    mask[:prefix, :prefix] = True
    q, k, v = qkv(columns=(0.2,))
    model = crisp_flex.compile(Sdpa(), CONFIG)
    got, want = model(q, k, v, attn_mask=mask), dense(q, k, v, attn_mask=mask)
    assert relative_error(got, want) < 1e-5


def test_b36_the_same_prefix_built_in_the_graph_is_not_read_as_causal():
    def image_and_text(q, k, v):
        i = torch.arange(L)
        mask = (i <= i[:, None]) | ((i < 137) & (i[:, None] < 137))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    q, k, v = qkv(columns=(0.2,))
    fn = crisp_flex.compile(image_and_text, CONFIG)
    assert relative_error(fn(q, k, v), image_and_text(q, k, v)) < 1e-5
    assert reasons(fn) == {Reason.MASK_UNREAD}


def test_b38_what_is_not_causal_is_never_made_causal():
    model = crisp_flex.compile(Sdpa(), CONFIG)
    for a, b in ((L, L), (L, 1500), (1500, L), (L // 2 + 5, L)):
        q, k, v = qkv(Lq=a, Lkv=b, columns=(0.0, 0.5, 1.0))
        got, want = model(q, k, v), dense(q, k, v)
        assert relative_error(got, want) < 1e-5
        assert relative_error(got[:, :, 0], want[:, :, 0]) < 1e-5
    assert reasons(model) == {Reason.NOT_CAUSAL}
