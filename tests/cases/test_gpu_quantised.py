"""On CUDA: torchao's int8, int4 and float8 models (B26), compiled with Inductor."""

import dataclasses

import pytest
import torch
from masked_attention import relative_error

import crisp_flex
from crisp_flex import CrispConfig
from tests.families.models import ids, make, ones

pytestmark = pytest.mark.gpu
LENGTH = 2048
CONFIG = CrispConfig(min_seqlen=1024, policy="dense")
# head dim 64; the tile-packed int4 kernel pads the input features to 1024
SIZES = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512, "initializer_range": 0.05}
# torchao's own Inductor settings are process-wide, and turn on TF32
ALONE = {"set_inductor_config": False}


def int8(quantization):
    return quantization.Int8WeightOnlyConfig(**ALONE)


def int4(quantization):
    return quantization.Int4WeightOnlyConfig(
        group_size=32, int4_packing_format="tile_packed_to_4d", **ALONE
    )


def float8(quantization):
    return quantization.Float8DynamicActivationFloat8WeightConfig(
        granularity=quantization.PerRow(), **ALONE
    )


@pytest.mark.parametrize(
    ("weights", "capability", "tolerance"),
    [
        (int8, (8, 0), 3e-2),
        (int4, (8, 0), 3e-2),
        # another rounding of an activation is another float8 number, a sixteenth away
        (float8, (8, 9), 1e-1),
    ],
    ids=["int8 weight-only", "int4 weight-only", "float8 dynamic"],
)
def test_b26_a_quantised_model_is_sparse_and_right(weights, capability, tolerance):
    quantization = pytest.importorskip("torchao.quantization")
    if torch.cuda.get_device_capability() < capability:
        pytest.skip(f"torchao's kernel needs compute capability {capability}")
    model = make("Llama", max_position_embeddings=4096, **SIZES).to("cuda", torch.bfloat16)
    quantization.quantize_(model, weights(quantization))
    assert type(model.model.layers[0].self_attn.q_proj.weight) is not torch.nn.Parameter
    prompt = {"input_ids": ids(LENGTH).cuda(), "use_cache": False}
    for extra in ({}, {"attention_mask": ones(LENGTH).cuda()}):
        torch._dynamo.reset()
        with torch.no_grad():
            want = model._call_impl(**prompt, **extra).logits.float()
            crisp_flex.compile(model, CONFIG)
            got = model(**prompt, **extra).logits.float()
        sites = [site for report in crisp_flex.reports(model) for site in report.sites]
        assert [site.selection for site in sites] == ["kernels"] * 2, sites
        assert relative_error(got, want) < tolerance
    with torch.no_grad():  # by default blocks are left out, and the answer is still a number
        crisp_flex.compile(model, dataclasses.replace(CONFIG, policy="hybrid"))
        assert model(**prompt).logits.isfinite().all()
