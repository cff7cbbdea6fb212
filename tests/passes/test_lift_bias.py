"""lift_mask on additive masks: 0 and -inf say what a boolean mask says, the rest is a bias."""

import pytest
import torch
import torch.nn.functional as F
from graphs import capture, large_masks
from mask_meaning import columns, pad, read, rows

from crisp_flex import CrispConfig, Reason
from crisp_flex.passes.pipeline import run_passes

INF = float("-inf")
MIN = torch.finfo(torch.float32).min


def causal(q, k):
    return columns(k) <= rows(q)


def zeros(q, k):
    return torch.zeros(q.shape[2], k.shape[2])


def filled_in_place(q, k):
    return torch.zeros(q.shape[2], k.shape[2]).masked_fill_(columns(k) > rows(q), INF)


def padded(q, k, valid):
    batch = torch.arange(q.shape[0])[:, None, None, None]
    mask = causal(q, k)[None, None] & valid[batch, columns(k)].bool()
    return torch.where(mask, 0.0, INF)


CAUSAL = {
    "where": lambda q, k: torch.where(causal(q, k), 0.0, INF),
    "where of a tensor": lambda q, k: torch.where(causal(q, k), torch.tensor(0.0), MIN),
    "where not": lambda q, k: torch.where(columns(k) > rows(q), MIN, 0.0),
    "masked_fill": lambda q, k: zeros(q, k).masked_fill(~causal(q, k), INF),
    "masked_fill in place": filled_in_place,
    "triu": lambda q, k: torch.triu(torch.full((q.shape[2], k.shape[2]), INF), diagonal=1),
    "triu of the minimum": lambda q, k: torch.triu(torch.full_like(zeros(q, k), MIN), 1),
    "sum": lambda q, k: torch.where(causal(q, k), 0.0, INF) + zeros(q, k),
    "cast": lambda q, k: torch.where(causal(q, k), 0.0, INF).to(torch.bfloat16).float(),
    "expanded": lambda q, k: torch.where(causal(q, k), 0.0, INF)[None, None].expand(2, 1, -1, -1),
}
BIAS = {
    "alibi": lambda q, k: torch.where(causal(q, k), 0.0, INF) - 0.1 * (rows(q) - columns(k)),
    "a large number": lambda q, k: torch.where(causal(q, k), 0.0, -1e9),
    "a bump": lambda q, k: torch.where(causal(q, k), 0.0, INF) + (columns(k) == 3) * 2.0,
    "ones": lambda q, k: torch.where(causal(q, k), 1.0, INF),
    "plus infinity": lambda q, k: torch.where(causal(q, k), 0.0, float("inf")),
    "a cast of the minimum": lambda q, k: torch.where(causal(q, k), 0.0, MIN).half().float(),
    "scaled": lambda q, k: torch.where(causal(q, k), 0.0, MIN) * 0.5,
    "either of two": lambda q, k: torch.where(causal(q, k), torch.triu(zeros(q, k) + INF, 2), 0.0),
}


@pytest.mark.parametrize("name", CAUSAL)
def test_a_mask_of_zeros_and_minus_infinity_is_read(name):
    spec = read(CAUSAL[name])
    assert spec.describe() == "causal"
    assert spec.finite == ("MIN" in CAUSAL[name].__code__.co_names)


def test_a_mask_of_a_dynamic_length_is_read():
    spec = read(lambda q, k: torch.where(causal(q, k), 0.0, torch.finfo(q.dtype).min), dynamic=True)
    assert spec.describe() == "causal"


@pytest.mark.parametrize("name", BIAS)
def test_a_bias_is_not_read(name):
    assert read(BIAS[name]).other


def test_an_additive_padding_mask_is_read():
    assert read(padded, pad()).describe() == "causal + padding"


def qkv(L=256):
    return torch.randn(2, 4, L, 32), torch.randn(2, 4, L, 32), torch.randn(2, 4, L, 32)


def additive(hidden):
    def fn(q, k, v):
        mask = torch.where(causal(q, k)[None, None], 0.0, hidden)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return fn


@pytest.mark.parametrize("hidden", [INF, MIN], ids=["infinity", "minimum"])
def test_an_additive_causal_mask_leaves_no_mask_behind(hidden):
    gm = capture(additive(hidden), *qkv())
    report = run_passes(gm, CrispConfig(min_seqlen=128))
    assert [site.mask for site in report.rewritten] == ["causal"]
    assert large_masks(gm, 256) == []


def test_a_row_of_minima_has_equal_weights_so_it_stays_dense():
    def masked(q, k, v, valid):
        batch = torch.arange(2)[:, None, None, None]
        mask = causal(q, k)[None, None] & valid[batch, columns(k)]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.where(mask, 0.0, MIN))

    gm = capture(masked, *qkv(), torch.arange(256).expand(2, 256) > 20)
    report = run_passes(gm, CrispConfig(min_seqlen=128))
    (site,) = report.rejected
    assert site.rejection.reason is Reason.FLOAT_MASK
    assert "all minimum" in site.rejection.detail
