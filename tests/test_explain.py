"""explain: every call with its reading, its reason and what to do; nothing of the model changes."""

import inspect
from dataclasses import replace

import pytest
import torch

import crisp_flex
from crisp_flex import (
    CrispConfig,
    CrispFlexError,
    Explanation,
    Reason,
    RewriteReport,
    SiteReport,
    torch_internals,
)
from crisp_flex.advice import ADVICE
from tests.families.models import ids, make

CONFIG = CrispConfig(min_seqlen=32, block_size=(16, 16), policy="dense")


@pytest.mark.parametrize("reason", Reason, ids=lambda reason: reason.name)
def test_every_reason_has_an_entry(reason):
    assert ADVICE[reason.name].strip() == ADVICE[reason.name]


def test_a_model_hooked_on_several_devices_is_explained_part_by_part(monkeypatch):
    """Before and after it is compiled; cpu:0 is another device than cpu, and works."""
    accelerate = pytest.importorskip("accelerate")
    layers = {f"model.layers.{i}": "cpu" for i in range(2)}
    ends = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"), "cpu")
    model = accelerate.dispatch_model(make("Llama"), {**ends, **layers}, force_hooks=True)
    model._hf_hook.execution_device = "cpu:0"
    monkeypatch.setattr(torch_internals, "compile_with_inductor", lambda gm, *_: gm.forward)

    def explained():
        before = [(x.forward, x._old_forward) for x in model.modules() if "_hf_hook" in vars(x)]
        with torch.no_grad():
            found = crisp_flex.explain(model, input_ids=ids(), use_cache=False, config=CONFIG)
        assert [site.module_path for site in found.report.rewritten] == [
            f"model.layers.{i}.self_attn" for i in range(2)
        ]
        assert "2 parts of the model are compiled one by one" in str(found)
        assert found.breaks == []
        after = [(x.forward, x._old_forward) for x in model.modules() if "_hf_hook" in vars(x)]
        assert after == before
        return len(after)

    hooks = explained()
    crisp_flex.compile(model, CONFIG)
    assert explained() < hooks
    assert crisp_flex.reports(model) == []


def test_text_html_and_data_say_the_same():
    model = make("Llama")
    found = crisp_flex.explain(model, input_ids=ids(), config=CONFIG)
    assert "2 of" not in repr(found).splitlines()[0].replace("0 of 2", "")
    for text in (repr(found), found._repr_html_()):
        assert "model.layers.0-1.self_attn (2 sites)" in text
        assert "call it under torch.no_grad()" in text
    data = found.to_dict()
    assert (data["rewritten"], data["sites"], data["graph_breaks"]) == (0, 2, [])
    assert {call["reason"] for call in data["calls"]} == {"NEEDS_GRAD"}


def test_alike_calls_share_a_line_and_others_stand_apart(tmp_path):
    def site(layer, mask="causal"):
        return SiteReport(layer, f"sdpa_{layer}", f"model.layers.{layer}.attn.0", "q[1]", mask)

    window = "causal + window 512"
    found = Explanation(
        [RewriteReport([site(i, window if i in (1, 4) else "causal") for i in range(6)])]
    )
    places = ("model.layers.0, 2-3, 5.attn.0 (4 sites)", "model.layers.1, 4.attn.0 (2 sites)")
    lines = str(found).splitlines()[1:3]
    assert [line.strip().partition(":")[0] for line in lines] == list(places)
    html = found._repr_html_()
    assert html.count("<tr><td>") == 2
    assert all(f"<td>{place}</td>" in html for place in places)
    found.save_html(tmp_path / "found.html")
    assert html.partition("</p>")[2] in (tmp_path / "found.html").read_text()
    with pytest.raises(CrispFlexError, match=r"cannot write .*: choose another file"):
        found.save_html(tmp_path)
    assert [call["module_path"] for call in found.to_dict()["calls"]] == [
        f"model.layers.{i}.attn.0" for i in range(6)
    ]
    apart = Explanation([RewriteReport([replace(site(0), module_path="")] * 2)])
    assert str(apart).splitlines()[1].startswith("  sdpa_0 (2 sites): ")


def broken(q):
    attend = torch.nn.functional.scaled_dot_product_attention
    q = attend(q, q, q, is_causal=True)
    torch._dynamo.graph_break()
    return attend(q, q, q, is_causal=True)


def test_graph_breaks_are_named():
    with torch.no_grad():
        found = crisp_flex.explain(broken, torch.zeros(1, 2, 64, 16), config=CONFIG)
    assert len(found.graphs) == 2
    assert len(found.report.rewritten) == 2
    assert "graph break: " in str(found)


@pytest.mark.skipif(
    "isolate_recompiles" not in inspect.signature(torch.compile).parameters,
    reason="before torch 2.13 graphs behind a graph break stay in the caches",
)
def test_what_was_explained_leaves_the_recompile_limit_to_the_model():
    graphs = []

    def count(gm, _):
        graphs.append(gm)
        return gm.forward

    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=1):
        for length in (64, 65, 66):
            q = torch.zeros(1, 2, length, 16)
            assert len(crisp_flex.explain(broken, q, config=CONFIG).graphs) == 2
        torch.compile(broken, backend=count)(torch.zeros(1, 2, 32, 16))
    assert len(graphs) == 2


def test_attention_that_stands_inside_another_call_is_named():
    layer = torch.nn.TransformerEncoderLayer(32, 2, 32, batch_first=True).eval()
    with torch.no_grad():
        found = crisp_flex.explain(layer, torch.zeros(1, 64, 32), config=CONFIG)
    assert found.report.sites == []
    assert "torch.nn.MultiheadAttention and what is built on it are one call" in str(found)
