"""What the command line says and returns."""

import json
import subprocess
import sys

import pytest
import torch

from crisp_flex import UnavailableError, toolchain, torch_internals
from crisp_flex.cli import main, quality


def test_help_loads_no_model_library():
    script = (
        "import sys; from crisp_flex.cli import main\n"
        "try: main(['demo', '--help'])\n"
        "except SystemExit as stop: code = stop.code\n"
        "sys.exit(code or int(bool({'transformers', 'matplotlib', 'rich'} & set(sys.modules))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    for option in ("--model", "--device", "--length", "--policy", "--preset", "--output"):
        assert option in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["demo", "--policy", "nonsense"],
        ["demo", "--length", "many"],
        ["doctor", "--jsn"],
    ],
    ids=["no command", "unknown command", "unknown policy", "not a number", "unknown option"],
)
def test_wrong_arguments_exit_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "usage: crisp-flex" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--length", "0"], "--length is 0"),
        (["--device", "abacus"], "must be cpu, cuda or cuda:N"),
        (["--device", "cuda:99"], "no such CUDA device"),
        (["--model", "no/such/file.gguf"], "There is no file"),
        (["--model", "./no-such-folder"], "There is no folder ./no-such-folder: give --model"),
        (["--depth", "3"], "--depth is 3.0; it must lie between 0 and 1"),
        (["--output", "/dev/null/x"], "choose a folder with --output"),
        pytest.param(
            ["--device", "cuda"],
            "no such CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
    ids=[
        "length",
        "unknown device",
        "device number",
        "model",
        "folder",
        "depth",
        "output",
        "device",
    ],
)
def test_errors_are_one_sentence_and_exit_with_2(arguments, says, capsys):
    pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    assert main(["demo", *arguments]) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_doctor_says_what_runs_here_and_exits_with_0(capsys):
    assert main(["doctor", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is True
    states = {finding["what"]: finding["state"] for finding in answer["findings"]}
    assert states["torch"] == "ok"
    if not torch.cuda.is_available():
        assert states["C++ compiler"] == states["CPU kernel"] == "ok"


def test_doctor_exits_with_1_without_a_compiler_and_names_traps(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch_internals, "cpp_compiler", lambda: None)
    toolchain.missing.cache_clear()
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    toolchain.missing.cache_clear()
    assert "install g++, or set CXX" in out
    assert "TORCH_COMPILE_DISABLE  is set to '1'; torch.compile does nothing" in out
    assert out.endswith("crisp_flex cannot run here: put right what is marked fail\n")


def test_doctor_fails_where_nothing_is_compiled(monkeypatch, capsys):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    assert main(["doctor", "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert "TORCHDYNAMO_DISABLE" in [f["what"] for f in findings if f["state"] == "fail"]


def test_quality_needs_a_checkout(tmp_path):
    with pytest.raises(UnavailableError, match="quality needs a checkout of the project"):
        quality.run([], root=tmp_path)


def test_quality_hands_its_options_on(monkeypatch):
    handed = []
    monkeypatch.setattr(quality, "run", lambda rest: handed.append(rest) or 0)
    assert main(["quality", "--quick", "--out", "rows.jsonl"]) == 0
    assert handed == [["--quick", "--out", "rows.jsonl"]]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--config", "missing.toml"], "cannot read the config file missing.toml ("),
        (["--html", "/no/such/folder/x.html"], "there is no such folder to write it to"),
    ],
    ids=["config", "html"],
)
def test_explain_says_at_once_which_file_is_missing(arguments, says, capsys):
    pytest.importorskip("transformers")
    assert main(["explain", *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_explain_refuses_a_wrong_config_file_in_one_sentence(tmp_path, capsys):
    pytest.importorskip("transformers")
    file = tmp_path / "crisp.toml"
    file.write_text('polcy = "dense"\n')
    assert main(["explain", "--config", str(file)]) == 2
    error = capsys.readouterr().err
    assert f"{file}: unknown option ['polcy']; CrispConfig has" in error
    assert error.count("\n") == 1
