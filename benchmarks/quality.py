"""What selections keep and what that costs: real models, real text, retrieval, one kernel for all.

    python benchmarks/quality.py [--models smollm2 gemma3 | NAME=PATH | PATH ...] [--policies ...]
        [--lengths ...] [--out FILE.jsonl] [--quick] [--adapter [FILE]] [--rope-theta X]

Policies: fast, balanced, accurate; a policy with fields of CrispConfig, as in
"hybrid:coverage=.9,block_size=128x64"; select=MODULE:FUNCTION, called as (q, k, v, layer), which
returns a BlockMask. A policy that this version does not know is skipped, with a line that says so.

Rows, one JSON line each; a row that is in --out already is not measured again:
  text   a policy on one window of code or prose: density (kept over visible blocks of all selected
         layers), exact mass recall on sampled query blocks, KL(dense || sparse), top-1 agreement
         and loss difference over the last 1024 positions
  routing  c_struct and root JSD of every layer and head of a text's first window, and how often
         c_struct >= tau says what root JSD >= .1 says
  task   a policy on --samples prompts of a retrieval task at one depth: mean score, its 95 %
         Wilson interval and the mean density. The prompt step is the policy's, decoding is dense.
Layers with a sliding window stay dense. No query block is kept whole for being the last one unless
--dense-last-blocks says so.
"""

import argparse
import sys

import quality_policies
import torch
from long_context_model import ADAPTER
from quality_models import Switch, open_model
from quality_rows import Plan, count_rows, measure
from quality_tasks import DEPTHS, TASKS

from crisp_flex import ConfigError
from crisp_flex.demo.errors import DemoError


def line_of(row):
    """A row in one line for the terminal."""
    head = f"{row['model']} {row['length']:>6} {row.get('policy', 'routing'):<36.36}"
    if row["row"] == "routing":
        return (
            f"{head} {row['text']:<5} {row['window']} c_struct agrees with JSD: "
            f"{row['agreement']:.3f} of heads (lines only: {row['agreement_of_lines_only']:.3f})"
        )
    if row["row"] == "text":
        return (
            f"{head} {row['text']:<5} {row['window']} density {row['density']:.3f} "
            f"recall {row['recall']:.3f} kl {row['kl']:.4f} top1 {row['top1']:.3f}"
        )
    low, high = row["wilson"]
    return (
        f"{head} {row['task']:<10} depth {row['depth']:.1f} {row['score']:.2f} "
        f"[{low:.2f}, {high:.2f}] of {row['samples']}, density {row['density']:.3f}"
    )


def parser_of():
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--models", nargs="+", default=["smollm2"], help="smollm2, gemma3, NAME=PATH, or a path")
    add("--policies", nargs="+", help="default: all; with --quick a few")
    add("--selector", nargs="+", default=[], help="MODULE:FUNCTION, besides --policies")
    add("--lengths", nargs="+", type=int, help="default: 2048 4096 8192; with --quick 2048")
    add("--tasks", nargs="*", choices=TASKS, help="default: all; with --quick single")
    add("--depths", nargs="+", type=float)
    add("--samples", type=int, help="prompts a task and depth; default 20, with --quick 2")
    add("--windows", type=int, help="disjoint windows a kind of text; default 3, with --quick 1")
    add("--dense-last-blocks", type=int, default=0)
    add("--quick", action="store_true", help="the CPU in under ten minutes")
    add("--adapter", nargs="?", const=str(ADAPTER), help=f"FILE of SmolLM2; alone: {ADAPTER.name}")
    add("--rope-theta", type=float)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", help="default: bfloat16 on CUDA, float32 on the CPU")
    add("--kernel", choices=("flex", "masked"), help="default: flex on CUDA, masked on the CPU")
    add("--out", help="JSONL, appended to; rows in it are not measured again")
    return parser


def selections_of(names, *, dense_last_blocks, say=None):
    """The selections that `names` spell; what this version does not know is said and left out.

    Args:
        names: As quality_policies.parse takes them.
        dense_last_blocks: As there.
        say: Called with a line for each that is left out; None writes to stderr.
    """
    selections = []
    for name in names:
        try:
            selections.append(quality_policies.parse(name, dense_last_blocks=dense_last_blocks))
        except ConfigError as error:
            (say or _warn)(f"skipped policy {name}: {error}")
    return tuple(selections)


def _warn(line):
    print(line, file=sys.stderr, flush=True)


def plan_of(args, model_name, dtype, kernel):
    """The Plan of the arguments for one model."""
    quick = args.quick
    names = args.policies or (quality_policies.QUICK if quick else quality_policies.ALL)
    names = (*names, *(f"select={name}" for name in args.selector))
    base = {
        "model": model_name, "dtype": dtype, "kernel": kernel,
        "dense_last_blocks": args.dense_last_blocks,
    }  # fmt: skip
    last = args.dense_last_blocks
    tasks = args.tasks if args.tasks is not None else (("single",) if quick else TASKS)
    return Plan(
        selections=selections_of(names, dense_last_blocks=last),
        lengths=tuple(args.lengths or ((2048,) if quick else (2048, 4096, 8192))),
        windows=args.windows or (1 if quick else 3),
        tasks=tuple(tasks),
        depths=tuple(args.depths or ((0.5,) if quick else DEPTHS)),
        samples=args.samples or (2 if quick else 20),
        base=base,
    )


def main():
    """Measure every model, with a progress bar."""
    parser = parser_of()
    args = parser.parse_args()
    from rich.progress import Progress

    dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    kernel = args.kernel or ("flex" if args.device == "cuda" else "masked")
    for text in args.models:
        try:
            loaded = open_model(
                text, device=args.device, dtype=getattr(torch, dtype), adapter=args.adapter,
                rope_theta=args.rope_theta,
            )  # fmt: skip
        except DemoError as error:
            parser.exit(1, f"{text}: {error}\n")
        plan = plan_of(args, loaded.name, dtype, kernel)
        if not plan.selections:
            parser.exit(1, "no policy is left to measure\n")
        switch = Switch(loaded.model, kernel=kernel)
        with Progress() as progress:
            bar = progress.add_task(loaded.name, total=count_rows(plan))

            def show(row, progress=progress, bar=bar):
                progress.console.print(line_of(row), highlight=False, soft_wrap=True, markup=False)
                progress.advance(bar)

            measure(loaded, switch, plan, out=args.out, on_row=show)


if __name__ == "__main__":
    main()
