"""Models in wrappers: generate (B01), ones masks (B02), hooks (B13), LoRA (B25), torchao (B26).

Graphs run as they are rewritten, without Inductor: with policy "dense" that is exact.
"""

import pytest
import torch
from masked_attention import relative_error

import crisp_flex
from crisp_flex import CrispConfig, Reason
from tests.families.models import LENGTH, ids, make, ones

CONFIG = CrispConfig(min_seqlen=32, block_size=(16, 16), policy="dense")
LAYERS = 9  # more than Dynamo's limit of recompilations


pytestmark = pytest.mark.usefixtures("without_inductor")


def llama(layers=2):
    return make("Llama", num_hidden_layers=layers)


def logits(model, **kwargs):
    return model(input_ids=ids(), use_cache=False, **kwargs).logits


def rewritten(model):
    return sum(len(report.rewritten) for report in crisp_flex.reports(model))


def test_b01_generate_takes_the_compiled_forward():
    want = llama().generate(ids(), max_new_tokens=3, min_new_tokens=3, do_sample=False)
    model = crisp_flex.compile(llama(), CONFIG)
    got = model.generate(ids(), max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert torch.equal(got, want)
    assert rewritten(model) == 2


def test_b01_the_prompt_step_is_ours_with_a_static_cache_too():
    kwargs = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    want = llama().generate(ids(), **kwargs)
    model = crisp_flex.compile(llama(), CONFIG)
    got = model.generate(ids(), cache_implementation="static", **kwargs)
    assert torch.equal(got, want)
    assert rewritten(model) == 2


def test_b01_a_prompt_in_chunks_is_sparse_chunk_by_chunk():
    kwargs = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    want = llama().generate(ids(), **kwargs)
    model = crisp_flex.compile(llama(), CONFIG, dynamic=False)
    got = model.generate(ids(), prefill_chunk_size=48, **kwargs)
    assert torch.equal(got, want)
    masks = [site.mask for report in crisp_flex.reports(model) for site in report.rewritten]
    assert masks[:2] == ["causal"] * 2
    assert len(masks) == 4  # both layers, both chunks


def test_b02_an_all_ones_mask_takes_the_same_path():
    model = crisp_flex.compile(llama(), CONFIG)
    plain = logits(model)
    assert relative_error(logits(model, attention_mask=ones(LENGTH)), plain) < 1e-6
    assert rewritten(model) == 4


def hooked(layers, *, devices):
    """A model with accelerate's hooks; cpu:0 is another device than cpu, and works."""
    accelerate = pytest.importorskip("accelerate")
    parts = [f"model.layers.{i}" for i in range(layers)]
    parts += ["model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"]
    model = accelerate.dispatch_model(llama(layers), dict.fromkeys(parts, "cpu"), force_hooks=True)
    if devices > 1:
        model._hf_hook.execution_device = "cpu:0"
    return model


@pytest.mark.parametrize("devices", [1, 2], ids=["one device", "a hook a layer"])
def test_b13_every_layer_under_hooks_is_sparse(devices):
    want = logits(llama(LAYERS))
    model = crisp_flex.compile(hooked(LAYERS, devices=devices), CONFIG)
    assert relative_error(logits(model), want) < 1e-5
    graphs = crisp_flex.reports(model)
    assert len(graphs) == (1 if devices == 1 else LAYERS)
    assert sum(len(graph.rewritten) for graph in graphs) == LAYERS
    paths = [site.module_path for graph in graphs for site in graph.sites]
    assert paths == [f"model.layers.{i}.self_attn" for i in range(LAYERS)]
    assert model.generate(ids(), max_new_tokens=1).shape[1] == LENGTH + 1


def test_b13_adapters_over_hooks_and_a_second_compilation():
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(hooked(2, devices=2), lora).eval()
    for config, sparse in ((CrispConfig(min_seqlen=LENGTH + 1), 0), (CONFIG, 2)):
        crisp_flex.compile(model, config)
        assert relative_error(logits(model), logits(llama())) < 1e-5
        assert rewritten(model) == sparse


def test_b13_offloaded_weights_are_left_alone_with_a_warning():
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.cpu_offload(llama(1), execution_device="cpu")
    hooks = [name for name, module in model.named_modules() if hasattr(module, "_hf_hook")]
    with pytest.warns(UserWarning, match="offload"):
        crisp_flex.compile(model, CONFIG)
    assert hooks == [name for name, module in model.named_modules() if hasattr(module, "_hf_hook")]


def test_b25_adapters_show_in_the_next_call_and_generate_is_sparse():
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(llama(), lora).eval()
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.normal_(std=0.2)
    on = logits(model)
    with model.disable_adapter():
        off = logits(model)
    assert relative_error(off, on) > 0.01
    compiled = crisp_flex.compile(model, CONFIG)
    assert compiled is model
    assert relative_error(logits(compiled), on) < 1e-5
    with compiled.disable_adapter():
        assert relative_error(logits(compiled), off) < 1e-5
    assert relative_error(logits(compiled), on) < 1e-5
    before = rewritten(compiled)
    compiled.generate(input_ids=ids(), max_new_tokens=2, do_sample=False)
    assert rewritten(compiled) >= before + 2


@pytest.mark.parametrize("weights", ["int8", "int4", "int4 unpacked"])
def test_b26_quantised_weights_keep_the_sites(weights):
    quantization = pytest.importorskip("torchao.quantization")
    int4 = pytest.importorskip("torchao.prototype.quantization.int4")
    config = {
        "int8": lambda: quantization.Int8WeightOnlyConfig(),
        # the layout of the CPU's own kernel
        "int4": lambda: int4.PrototypeInt4WeightOnlyConfig(32, set_inductor_config=False),
        "int4 unpacked": lambda: quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4),
    }[weights]()
    model = llama()
    quantization.quantize_(model, config)
    assert type(model.lm_head.weight) is not torch.nn.Parameter
    want = logits(model)
    compiled = crisp_flex.compile(model, CONFIG)
    assert relative_error(logits(compiled), want) < 1e-5
    assert [len(report.sites) for report in crisp_flex.reports(model)] == [2]
    assert rewritten(compiled) == 2


def test_training_with_gradient_checkpointing_stays_dense():
    model = llama().train()
    model.gradient_checkpointing_enable()
    crisp_flex.compile(model, CONFIG)
    with torch.enable_grad():
        loss = model(input_ids=ids(), labels=ids(), use_cache=False).loss
        loss.backward()
    sites = [site for report in crisp_flex.reports(model) for site in report.sites]
    reasons = {site.rejection.reason for site in sites}
    assert reasons <= {Reason.NEEDS_GRAD, Reason.NESTED_GRAPH}
    assert all(p.grad is not None for p in model.model.layers.parameters())
