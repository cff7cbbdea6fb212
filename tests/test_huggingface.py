"""attn_implementation="crisp_flex": on request only; soft caps and sinks, in eager and sparse.

Graphs run as they are rewritten, where the eager operator ignores the lists: policy dense is exact.
"""

import importlib
import re

import pytest
import torch
from masked_attention import relative_error
from routed_blocks import routed_blocks

import crisp_flex
from crisp_flex import CrispConfig, CrispFlexBackend, Reason, huggingface, huggingface_op
from crisp_flex.passes import eligibility, sparse_call
from crisp_flex.routing import ops  # noqa: F401  (registers crisp_flex::route)

transformers = pytest.importorskip("transformers")
from tests.families.cells import run  # noqa: E402
from tests.families.models import ids, make  # noqa: E402

attention = torch.ops.crisp_flex.attention.default


@pytest.fixture
def sinks_allowed(monkeypatch):
    """As on CUDA, where the kernel gives the log-sum-exp; the eager operator gives it anywhere."""

    def but_for_the_cpu(test):
        return lambda site: (no for no in test(site) if no.reason is not Reason.CPU_SINKS)

    tests = tuple(but_for_the_cpu(test) for test in eligibility._TESTS)
    monkeypatch.setattr(eligibility, "_TESTS", tests)


def test_only_register_registers():
    names = transformers.AttentionInterface._global_mapping
    names.pop(huggingface.NAME, None)
    importlib.reload(huggingface)
    assert huggingface.NAME not in names
    assert huggingface.register() == "crisp_flex"
    assert huggingface.NAME in names
    masks = transformers.masking_utils.AttentionMaskInterface._global_mapping
    assert huggingface.NAME in masks  # else padding would be ignored


@pytest.mark.parametrize("family", ["Gemma 2", "gpt-oss"])
@pytest.mark.parametrize("call", ["left padding", "chunk"])
def test_uncompiled_it_equals_the_models_own_attention(family, call):
    from tests.families.models import CALLS

    results = []
    for how in ("eager", huggingface.register()):
        model = make(family, attention=how)
        made = CALLS[call](model)
        with torch.no_grad():
            results.append(model(**made.kwargs).logits)
    rows = made.rows.expand(results[0].shape[:2])
    assert relative_error(results[1][rows], results[0][rows]) < 1e-5


def tiny(model_type, attention):
    """The tiny model of a family that docs/families.md does not list."""
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    plain = transformers.CONFIG_MAPPING[model_type]()
    sizes = {"num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 1, "n_layer": 1}
    sizes |= {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
    settings = {name: size for name, size in sizes.items() if getattr(plain, name, None)}
    config = transformers.CONFIG_MAPPING[model_type](**settings, pad_token_id=0)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def padded():
    mask = torch.ones(2, 96, dtype=torch.int64)
    mask[0, :21] = 0
    return {"input_ids": ids(batch=2), "attention_mask": mask}


@pytest.mark.parametrize("model_type", sorted(huggingface._COMPARED - {"gemma2", "gpt_oss"}))
def test_a_family_that_refuses_sdpa_equals_its_own_attention(model_type):
    models = [tiny(model_type, how).eval() for how in ("eager", huggingface.register())]
    models[1].load_state_dict(models[0].state_dict())
    with torch.no_grad():
        want, got = (
            model(**padded()).logits[padded()["attention_mask"].bool()] for model in models
        )
    assert relative_error(got, want) < 1e-5


def test_a_model_that_asks_no_registry_is_refused_compiled_or_not():
    """Bloom would add True of the mask to its logits as 1."""
    model = tiny("bloom", huggingface.register()).eval()
    says = "BloomForCausalLM writes its own attention and never asks for .*: load it with .*eager"
    for fn in (model, torch.compile(model, backend="eager")):
        with torch.no_grad(), pytest.raises(NotImplementedError, match=says):
            fn(**padded())


@pytest.mark.parametrize(
    ("model_type", "says"),
    [
        ("llama", ""),
        ("gpt_oss", ""),
        ("a model of the user's own", ""),
        ("falcon", 'FalconForCausalLM writes its own .* attn_implementation="sdpa"$'),
        # it appends the keys that it chose to the mask
        ("deepseek_v4", 'DeepseekV4ForCausalLM refuses SDPA, .* attn_implementation="eager"$'),
    ],
)
def test_which_families_take_this_route(model_type, says):
    found = huggingface._cannot_serve(model_type)
    assert re.search(says, found) if says else not found


def test_a_tensor_that_says_more_about_the_logits_is_refused(qkv):
    q, k, v = qkv(Lq=32)
    layer = torch.nn.Identity()
    positions = torch.arange(32)[None]
    huggingface.attention_forward(layer, q, k, v, None, position_ids=positions, use_cache=True)
    with pytest.raises(NotImplementedError, match="what Identity means by position_bias, indices"):
        huggingface.attention_forward(
            layer, q, k, v, None, position_bias=q, position_ids=positions, indices=positions
        )


@pytest.mark.parametrize("call", ["left padding", "static second turn"])
def test_sinks_are_merged_exactly(call, sinks_allowed):
    cell = run("gpt-oss", call)
    assert cell.outcomes == {"sparse": 1, "window": 1}
    assert cell.error < 1e-5


def test_the_checks_are_sharp(sinks_allowed, monkeypatch):
    monkeypatch.setattr(sparse_call, "share_with_sinks", lambda graph, out, *_: out)
    from crisp_flex.passes import rewrite

    monkeypatch.setattr(rewrite, "share_with_sinks", lambda graph, out, *_: out)
    assert run("gpt-oss", "plain").error > 1e-3
    right = sparse_call.flex_hop.flex_call
    monkeypatch.setattr(
        sparse_call.flex_hop, "flex_call", lambda gm, **kw: right(gm, **{**kw, "softcap": None})
    )
    assert run("Gemma 2", "plain").error > 1e-3


def test_a_gradient_goes_through_the_formula():
    grads = []
    for how in ("eager", huggingface.register()):
        model = make("gpt-oss", attention=how).train()
        model(input_ids=ids(), labels=ids(), use_cache=False).loss.backward()
        layer = model.model.layers[0].self_attn
        grads.append([x.grad.clone() for x in (layer.sinks, layer.q_proj.weight)])
    for got, want in zip(*reversed(grads), strict=True):
        assert relative_error(got, want) < 1e-4


def test_explain_says_what_a_model_with_sinks_gets_on_the_cpu():
    with torch.no_grad():
        found = crisp_flex.explain(
            make("gpt-oss"), ids(), config=CrispConfig(min_seqlen=32), use_cache=False
        )
    assert {site.rejection.reason for site in found.report.sites} == {Reason.CPU_SINKS}


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_the_operator_is_dense_attention_row_part_by_row_part(cap, sinks, qkv, monkeypatch):
    monkeypatch.setattr(huggingface_op, "ROWS", 100)
    q, k, v = qkv(B=2, Lq=230, D=16)
    extra = torch.randn(4) if sinks else None
    mask = torch.ones(1, 1, 230, 230, dtype=torch.bool).tril()
    got = attention(q, k, v, None, extra, True, 0.3, cap)
    want = huggingface_op.formula(q, k, v, mask, extra, None, 0.3, cap)
    assert relative_error(got, want) < 1e-6
    torch.library.opcheck(attention, (q, k, v, mask, extra, False, 0.3, cap))
    if cap is None and not sinks:
        plain = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=0.3, enable_gqa=True
        )
        assert relative_error(got, plain) < 1e-5


@pytest.mark.long  # the cap itself is checked in the cells above, without a compiler
def test_a_capped_call_is_sparse_through_inductor(qkv):
    """The blocks are chosen by the uncapped logits; the attention over them is capped."""
    q, k, v = qkv(Lq=300, D=32)
    config = CrispConfig(
        min_seqlen=128,
        policy="streaming",
        streaming_blocks=1,
        dense_last_blocks=0,
        max_uncovered=1.0,
        block_size=(64, 64),
    )
    backend = CrispFlexBackend(config)
    with torch.no_grad():
        fn = torch.compile(
            lambda q, k, v: attention(q, k, v, None, None, True, 1.0, 2.0), backend=backend
        )
        got = fn(q, k, v)
        ((site,),) = (report.sites for report in backend.reports.values())
        assert site.rewritten
        keep = routed_blocks(q, k, config).repeat_interleave(64, -1).repeat_interleave(64, -2)
        mask = keep[:, :, :300, :300].tril()
        want = huggingface_op.formula(q, k, v, mask, None, None, 1.0, 2.0)
    assert relative_error(got, want) < 2e-6
    assert relative_error(got, attention(q, k, v, None, None, True, 1.0, None)) > 0.1


def test_a_row_of_nan_stays_nan_and_large_fp16_logits_stay_finite():
    q = torch.full((1, 2, 4, 128), 30.0, dtype=torch.float16)
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()
    mask[..., 3, :] = False  # sees nothing
    v = torch.ones_like(q)
    bad = q.clone()
    bad[0, 0, 1] = float("nan")
    args = (mask, torch.zeros(2), False, 128**-0.5, 50.0)
    out = torch.ops.crisp_flex.attention.default(bad, q, v, *args)
    want = torch.ops.crisp_flex.attention.default(q, q, v, *args)
    assert want.isfinite().all()
    assert want[:, :, :3].float().min() > 0.99
    assert (want[:, :, 3] == 0).all()
    assert out[0, 0, 1].isnan().all()
    out[0, 0, 1] = want[0, 0, 1]
    assert torch.equal(out, want)
