"""benchmarks/quality.py in a tiny form: a random model of two layers, 512 tokens, no compiler."""

import json
from types import SimpleNamespace

import pytest
import torch

from crisp_flex import ConfigError, CrispConfig, route

transformers = pytest.importorskip("transformers")


class Bytes:
    """A tokenizer of one token a byte."""

    def encode(self, text, *, add_special_tokens):
        return list(text.encode())

    def decode(self, ids):
        return bytes(ids).decode(errors="replace")


@pytest.fixture
def loaded():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048,
        initializer_range=0.2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    return SimpleNamespace(name="tiny", model=model, tokenizer=Bytes())


def plan_of(module_of, *policies, **changes):
    quality, policies_of = module_of("quality"), module_of("quality_policies")
    settings = {
        "selections": tuple(policies_of.parse(p, dense_last_blocks=0) for p in policies),
        "lengths": (512,), "windows": 1, "tasks": ("single",), "depths": (0.5,), "samples": 1,
        "base": {"model": "tiny", "dtype": "float32", "kernel": "masked", "dense_last_blocks": 0},
    }  # fmt: skip
    return quality.Plan(**{**settings, **changes})


def test_a_run_measures_each_row_once_and_dense_costs_nothing(module_of, loaded, tmp_path):
    quality, models = module_of("quality"), module_of("quality_models")
    switch = models.Switch(loaded.model, kernel="masked")
    plan = plan_of(module_of, "dense", "streaming:streaming_blocks=1,block_size=64x64")
    out = tmp_path / "rows.jsonl"
    quality.measure(loaded, switch, plan, out=out, on_row=lambda _: None)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    text = {r["policy"][:5]: r for r in rows if r["row"] == "text" and r["text"] == "code"}
    assert text["dense"]["density"] == 1
    assert text["dense"]["recall"] == pytest.approx(1, abs=1e-5)
    assert text["dense"]["kl"] == pytest.approx(0, abs=1e-6)
    # blocks of 64: 1, 2, 3, 4, 4, ... 4 of 1 ... 8: column 0 and what holds the last 128 tokens
    assert text["strea"]["density"] == pytest.approx(26 / 36)
    assert text["strea"]["kl"] > 1e-5
    assert text["strea"]["recall"] < 0.95
    assert sum(r["row"] == "task" for r in rows) == 3
    assert quality.count_rows(plan) == len(rows)
    assert quality.measure(loaded, switch, plan, out=out, on_row=lambda _: None) == []


def test_recall_is_the_softmax_mass_of_kept_blocks(module_of):
    measures = module_of("quality_measures")
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, 256, 16), torch.randn(1, 1, 256, 16)
    mask = route(q, k, CrispConfig(policy="streaming", streaming_blocks=1, block_size=(32, 32),
                                   dense_last_blocks=0, max_uncovered=1.0))  # fmt: skip
    kept = measures.kept_map(mask)[0]
    got = measures.mass_recall(q[0], k[0], kept, 0.25, (32, 32))
    p = (q[0] @ k[0].mT * 0.25).masked_fill(~torch.ones(256, 256).tril().bool(), -1e30).softmax(-1)
    p = p.view(2, 8, 32, 8, 32).sum(-1).mean(2)
    want = (p * kept).sum(-1)
    torch.testing.assert_close(got[:, -1], want[:, -1])
    # blocks of 32 in two heads: column 0 and the last 128 tokens are 1, 2, 3, 4, 5, 6, 6, 6
    assert kept.sum() == 2 * 33


def test_policies_are_spelled_as_text(module_of):
    parse = module_of("quality_policies").parse
    config = parse("hybrid:coverage=.8,block_size=128x64", dense_last_blocks=0).config
    assert (config.coverage, config.block_size, config.dense_last_blocks) == (0.8, (128, 64), 0)
    assert parse("crisp:router=jsd", dense_last_blocks=1).config.max_uncovered == 1.0
    assert parse("fast", dense_last_blocks=1).config == CrispConfig.preset("fast")
    for wrong in ("nothing", "hybrid:coverage", "hybrid:nothing=1"):
        with pytest.raises(ConfigError):
            parse(wrong, dense_last_blocks=0)


@pytest.mark.parametrize("depth", [0.0, 0.9])
def test_tasks_hide_their_answers_in_prompts_of_the_length(module_of, depth):
    tasks = module_of("quality_tasks")
    for task in tasks.TASKS:
        prompt = tasks.sample(task, Bytes(), 1536, depth=depth, seed=3)
        text = Bytes().decode(prompt.ids)
        assert len(prompt.ids) == 1536
        assert all(answer in text for answer in prompt.answers)
        assert prompt == tasks.sample(task, Bytes(), 1536, depth=depth, seed=3)
        assert tasks.score(text, prompt.answers) == 1
    assert tasks.score("yes B", ("B", "C")) == 0.5


def test_wilson_holds_the_known_interval(module_of):
    low, high = module_of("quality_tasks").wilson(0.5, 10)
    assert (low, high) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert module_of("quality_tasks").wilson(1.0, 10)[1] == pytest.approx(1)
