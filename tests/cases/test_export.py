"""torch.export beside and through crisp_flex (B40)."""

import pytest
import torch
import torch.nn.functional as F
from masked_attention import masked_attention, relative_error
from routed_blocks import routed_blocks

import crisp_flex
import crisp_flex.passes
from crisp_flex import CrispConfig, Reason
from tests.cases.peaky import CONFIG, Sdpa, dense, qkv

SPARSE = CrispConfig(
    min_seqlen=256, policy="streaming", streaming_blocks=1, dense_last_blocks=0, max_uncovered=1.0
)


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


def test_export_of_a_plain_model_is_left_alone():
    before = F.scaled_dot_product_attention
    crisp_flex.compile(Sdpa(is_causal=True), CONFIG)
    assert F.scaled_dot_product_attention is before
    inputs = qkv()
    program = torch.export.export(Sdpa(is_causal=True), inputs)
    assert relative_error(program.module()(*inputs), dense(*inputs, is_causal=True)) < 1e-6


def test_export_of_a_compiled_model_exports_the_model():
    model = crisp_flex.compile(Sdpa(is_causal=True), CONFIG)
    inputs = qkv()
    program = torch.export.export(model, inputs)
    assert relative_error(program.module()(*inputs), dense(*inputs, is_causal=True)) < 1e-6


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_an_exported_program_is_rewritten(dynamic):
    inputs = qkv()
    length = {2: torch.export.Dim.DYNAMIC} if dynamic else None
    shapes = (length,) * 3 if dynamic else None
    program = torch.export.export(Sdpa(is_causal=True), inputs, dynamic_shapes=shapes)
    report = crisp_flex.passes.run(program.graph_module, CONFIG)
    assert [site.mask for site in report.rewritten] == ["causal"]
    short = crisp_flex.passes.run(
        torch.export.export(Sdpa(is_causal=True), qkv(Lq=64)).graph_module, CONFIG
    )
    assert [site.rejection.reason for site in short.rejected] == [Reason.TOO_SHORT]


@pytest.mark.slow
def test_a_rewritten_program_is_sparse_in_aotinductor(tmp_path):
    q, k, v = qkv(Lq=640)
    program = torch.export.export(Sdpa(is_causal=True), (q, k, v))
    crisp_flex.passes.run(program.graph_module, SPARSE)
    package = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "attention.pt2")
    )
    got = torch._inductor.aoti_load_package(package)(q, k, v)
    keep = routed_blocks(q, k, SPARSE)
    assert relative_error(got, masked_attention(q, k, v, keep)) < 1e-5
