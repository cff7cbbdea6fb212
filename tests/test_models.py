"""Transformers models from tiny random configs: what compile, generate and explain do with them."""

import copy
import pickle

import pytest
import torch
from masked_attention import relative_error

import crisp_flex
from crisp_flex import ConfigError, CrispConfig, Reason
from crisp_flex.routing import ops

transformers = pytest.importorskip("transformers")
L = 384


def llama(layers=2):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        max_position_embeddings=4096,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config).eval()


def prompt(B=1, length=L):
    return torch.randint(3, 128, (B, length), generator=torch.Generator().manual_seed(1))


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_explain_says_that_every_layer_is_rewritten():
    model = llama()
    with torch.no_grad():
        for kwargs in ({}, {"attention_mask": torch.ones(1, L, dtype=torch.int64)}):
            found = crisp_flex.explain(
                model, prompt(), config=CrispConfig(min_seqlen=128), **kwargs
            )
            assert "2 of 2 attention calls rewritten" in str(found)
    paths = [site.module_path for site in found.report.sites]
    assert paths == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert set(paths) <= {name for name, _ in model.named_modules()}


def test_explain_gives_the_reason_and_leaves_the_model_alone():
    model = llama()
    with torch.no_grad():
        found = crisp_flex.explain(model, prompt())
    assert [s.rejection.reason for s in found.report.rejected] == [Reason.TOO_SHORT] * 2
    assert "min_seqlen=8192" in str(found)
    with pytest.raises(ConfigError, match="did not come from crisp_flex"):
        crisp_flex.reports(model)
    assert {s.rejection.reason for s in crisp_flex.explain(model, prompt()).report.sites} == {
        Reason.NEEDS_GRAD
    }


def test_explain_leaves_dynamos_caches_alone():
    model = llama(layers=1)
    config = CrispConfig(min_seqlen=128)
    with torch.no_grad():
        for length in range(200, 212):  # more than Dynamo's recompile limit of 8
            found = crisp_flex.explain(model, prompt(length=length), config=config)
            assert len(found.report.rewritten) == 1, length
        crisp_flex.compile(model, CrispConfig(min_seqlen=128, enabled=False))(prompt())
    (report,) = crisp_flex.reports(model)
    assert [site.rejection.reason for site in report.sites] == [Reason.DISABLED]


@pytest.mark.slow
def test_generate_is_sparse_in_the_prompt_step_and_adds_no_graph_per_decode_step():
    model = llama()
    keys = list(model.state_dict())
    ids = prompt()
    want = model.generate(ids, max_new_tokens=12, do_sample=False)
    compiled = crisp_flex.compile(model, CrispConfig(min_seqlen=128, policy="dense"))
    assert compiled is model
    assert list(model.state_dict()) == keys
    routed = []
    with ops.observe(lambda index, *_: routed.append(index)):
        first = model.generate(ids, max_new_tokens=4, do_sample=False)
        after_first = graphs()
        routed_first = len(routed)
        got = model.generate(ids, max_new_tokens=12, do_sample=False)
    assert routed_first == 2  # one route a layer, in the prompt step only
    assert len(routed) == 4
    assert graphs() == after_first <= 3  # prompt, decode, decode with a symbolic past
    assert torch.equal(first, want[:, : first.shape[1]])
    assert torch.equal(got, want)
    reports = crisp_flex.reports(model)
    assert [len(report.rewritten) for report in reports].count(2) == 1
    decode = {site.rejection.reason for report in reports for site in report.rejected}
    assert decode == {Reason.DECODE}


@pytest.mark.slow
def test_a_padded_batch_matches_the_model_alone():
    model = llama(layers=1)
    ids, mask = prompt(B=2), torch.ones(2, L, dtype=torch.int64)
    mask[0, :100] = 0
    with torch.no_grad():
        want = model(ids, attention_mask=mask).logits
        compiled = crisp_flex.compile(model, CrispConfig(min_seqlen=128, policy="dense"))
        got = compiled(ids, attention_mask=mask).logits
    (report,) = crisp_flex.reports(model)
    assert [site.mask for site in report.rewritten] == ["causal + padding"]
    assert relative_error(got[0, 100:], want[0, 100:]) < 1e-5
    assert relative_error(got[1], want[1]) < 1e-5


@pytest.mark.slow
def test_the_backend_by_name_takes_our_options_and_inductors():
    model = llama(layers=1)
    options = {"min_seqlen": 128, "preset": "accurate", "max_autotune": False}
    compiled = torch.compile(model, backend="crisp_flex", options=options)
    routed = []
    with torch.no_grad(), ops.observe(lambda index, *_: routed.append(index)):
        compiled(prompt())
    assert routed == [0]


def test_unknown_options_are_named():
    compiled = torch.compile(llama(layers=1), backend="crisp_flex", options={"min_seq_len": 128})
    with torch.no_grad(), pytest.raises(Exception, match="unknown option 'min_seq_len'"):
        compiled(prompt())
    with pytest.raises(ConfigError, match="unknown option 'max_autotunes'"):
        crisp_flex.compile(llama(layers=1), options={"max_autotunes": True})
    with pytest.raises(ConfigError, match="mode must be one of"):
        crisp_flex.compile(llama(layers=1), mode="fastest")
    with pytest.raises(ConfigError, match="sets backend itself"):
        crisp_flex.compile(llama(layers=1), backend="inductor")


def test_a_compiled_model_can_be_copied_and_pickled():
    model = crisp_flex.compile(llama(layers=1))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert list(twin.state_dict()) == list(model.state_dict())
        with torch.no_grad():
            assert torch.equal(
                twin(prompt(length=8)).logits, llama(layers=1)(prompt(length=8)).logits
            )
