"""Every script of benchmarks/ says what it is and, as far as it can, runs without a GPU."""

import json
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPTS = sorted(p.stem for p in BENCHMARKS.glob("*.py") if "def main(" in p.read_text())
NEED_TRITON = ("bench_route", "tune_flex")


@pytest.fixture
def run(module_of, monkeypatch, capsys):
    """run(script, *arguments): what its main() prints."""

    def call(script, *arguments):
        if script in NEED_TRITON:
            pytest.importorskip("triton")
        module = module_of(script)
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        module.main()
        return capsys.readouterr().out

    return call


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_says_what_a_script_is(run, capsys, script):
    with pytest.raises(SystemExit) as stopped:
        run(script, "--help")
    assert stopped.value.code == 0
    assert len(capsys.readouterr().out.splitlines()) > 5


def test_sanitize_runs_every_policy_on_the_reference(run):
    said = run("sanitize", "--device", "cpu", "--shapes", "ragged D 128, B 2", "one token")
    assert len(said.splitlines()) == 2 * 9


@pytest.mark.slow
def test_bench_attention_prints_a_row_and_judges_it(run, tmp_path):
    out = tmp_path / "rows.jsonl"
    arguments = ("--device", "cpu", "--lengths", 640, "--heads", "smollm2-135m", "--budget", 0.01)
    run("bench_attention", *arguments, "--out", out)
    (row,) = map(json.loads, out.read_text().splitlines())
    assert row["total_ms"] > 0
    assert row["ratio_sdpa"] == pytest.approx(row["sdpa_cpu_ms"] / row["total_ms"], rel=1e-3)
    assert float(row["error"]) < 3e-3


@pytest.mark.slow
def test_bench_prefill_runs_a_prompt_sparsely(run, tmp_path):
    out = tmp_path / "rows.jsonl"
    run(
        "bench_prefill", "--device", "cpu", "--layers", 1, "--hidden", 128, "--intermediate", 128,
        "--query-heads", 2, "--key-heads", 1, "--min-seqlen", 1024, "--rounds", 1, "--repeats", 1,
        "--lengths", 2048, "--out", out,
    )  # fmt: skip
    (row,) = map(json.loads, out.read_text().splitlines())
    assert row["row"] == "prefill"
    assert 0 < row["density"] < 0.9


@pytest.mark.long  # two models compiled, 15 s of a core
def test_bench_record_times_all_five_and_leaves_the_package_as_it_was(run, tmp_path):
    from crisp_flex import backend
    from crisp_flex.routing import ops

    before = backend.tracked, ops.RouteCall, ops._shown
    out = tmp_path / "rows.jsonl"
    said = run(
        "bench_record", "--device", "cpu", "--layers", 1, "--hidden", 64, "--intermediate", 64,
        "--query-heads", 1, "--key-heads", 1, "--length", 512, "--rounds", 1, "--repeats", 1,
        "--out", out,
    )  # fmt: skip
    (row,) = map(json.loads, out.read_text().splitlines())
    for name in ("off", "on", "read", "audit"):
        assert row[f"{name}_overhead"] == pytest.approx(
            row[f"{name}_ms"] / row["none_ms"] - 1, abs=1e-3
        )
        assert f"{name} " in said.splitlines()[-1]
    assert (backend.tracked, ops.RouteCall, ops._shown) == before


def test_decoding_continues_a_prompt(module_of):
    small, D = module_of("small_llama"), 32
    widths = small.Widths(hidden=64, intermediate=64, Hq=4, Hkv=2, D=D, layers=2, vocab=200)
    model = small.build(widths, device="cpu", dtype=torch.float32)
    ids = torch.randint(200, (1, 50))
    with torch.no_grad():
        want, _ = model(ids, *small.rotations(0, 50, D, "cpu"))
        _, caches = model(ids[:, :49], *small.rotations(0, 49, D, "cpu"))
        got, _ = model(ids[:, 49:], *small.rotations(49, 1, D, "cpu"), caches)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
