"""Under autocast a site is computed in SDPA's dtype, and a refused one stays as it was."""

import pytest
import torch
import torch.nn.functional as F
from graphs import capture, causal, causal_mask
from masked_attention import relative_error

from crisp_flex import CrispConfig, Reason
from crisp_flex.passes.pipeline import run_passes
from tests.families.cells import CONFIG
from tests.families.models import ids, make

L = 256
DTYPES = {
    "float32": (torch.float32,) * 3,
    "bfloat16 value": (torch.float32, torch.float32, torch.bfloat16),
    "bfloat16": (torch.bfloat16,) * 3,
}


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


def qkv(dtypes):
    return tuple(torch.randn(1, H, L, 16).to(x) for H, x in zip((4, 2, 2), dtypes, strict=True))


def inside(q, k, v):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return causal_mask(q, k, v)


def outside(fn, *inputs):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return fn(*inputs)


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("around", ["in the graph", "of the caller"])
def test_the_sparse_call_computes_in_the_dtype_of_autocast(dtypes, around):
    found, inputs = [], qkv(dtypes)
    fn = inside if around == "in the graph" else causal

    def backend(gm, example_inputs):
        found.extend(run_passes(gm, CONFIG).sites)
        return gm.forward

    got = outside(torch.compile(fn, backend=backend), *inputs)
    want = outside(fn, *inputs)
    (site,) = found
    assert site.rewritten, site
    assert "bfloat16" in site.shapes
    assert got.dtype == want.dtype == torch.bfloat16
    assert relative_error(got.float(), want.float()) < 2e-2


def test_a_refused_call_under_autocast_stays_as_it_was():
    gm = capture(inside, *qkv(DTYPES["float32"]))
    before = gm.code
    (site,) = run_passes(gm, CrispConfig(min_seqlen=L + 1)).sites
    assert site.rejection.reason is Reason.TOO_SHORT
    assert gm.code == before
    assert gm.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)


def test_a_model_in_float32_is_sparse_under_autocast():
    """Rotary positions make q and k float32, where v is bfloat16."""
    reports, model = [], make("Llama", num_hidden_layers=1)

    def backend(gm, example_inputs):
        reports.append(run_passes(gm, CONFIG))
        return gm.forward

    want = outside(model, ids()).logits
    got = outside(torch.compile(model, backend=backend), ids()).logits
    assert [len(report.rewritten) for report in reports] == [1]
    assert relative_error(got.float(), want.float()) < 2e-2
