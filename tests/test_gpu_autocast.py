"""On CUDA: a model in float32 under autocast, compiled with Inductor, selection by kernels."""

import pytest
import torch
from masked_attention import relative_error

import crisp_flex
from crisp_flex import CrispConfig
from tests.families.models import ids, make

LENGTH = 2048


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_a_float32_model_is_sparse_under_autocast(backend):
    sizes = {"hidden_size": 256, "head_dim": 64, "max_position_embeddings": 4096}
    model = make("Llama", initializer_range=0.05, **sizes).cuda()
    prompt = {"input_ids": ids(LENGTH).cuda(), "use_cache": False}
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        want = model(**prompt).logits.float()
        crisp_flex.compile(model, CrispConfig(min_seqlen=1024, policy="dense", backend=backend))
        got = model(**prompt).logits.float()
    sites = [site for report in crisp_flex.reports(model) for site in report.sites]
    assert [site.selection for site in sites] == ["kernels"] * 2, sites
    assert all("bfloat16" in site.shapes for site in sites)
    assert relative_error(got, want) < 3e-2
