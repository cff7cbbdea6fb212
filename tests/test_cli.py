"""What the command line says and returns."""

import subprocess
import sys

import pytest
import torch

from crisp_flex.cli import main


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
    [[], ["nonsense"], ["demo", "--policy", "nonsense"], ["demo", "--length", "many"]],
    ids=["no command", "unknown command", "unknown policy", "not a number"],
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
        pytest.param(
            ["--device", "cuda"],
            "no such CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
    ids=["length", "unknown device", "device number", "model", "device"],
)
def test_errors_are_one_sentence_and_exit_with_2(arguments, says, capsys):
    pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    assert main(["demo", *arguments]) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
