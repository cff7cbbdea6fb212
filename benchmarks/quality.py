"""What selections keep and what that costs: real models, real text, retrieval, one kernel for all.

    python benchmarks/quality.py [--models smollm2 gemma3=PATH | PATH ...] [--policies ...]
        [--lengths ...] [--out FILE.jsonl] [--quick] [--adapter FILE.safetensors --rope-theta X]

Policies: fast, balanced, accurate; a policy with fields of CrispConfig, as in
"hybrid:coverage=.9,block_size=128x64"; select=MODULE:FUNCTION, called as (q, k, v, layer), which
returns a BlockMask.

Rows, one JSON line each; a row that is in --out already is not measured again:
  text   a policy on one window of code or prose: density (kept over visible blocks of all selected
         layers), exact mass recall on sampled query blocks, KL(dense || sparse), top-1 agreement
         and loss difference over the last 1024 positions
  task   a policy on --samples prompts of a retrieval task at one depth: mean score and its 95 %
         Wilson interval. The prompt step is the policy's, decoding is dense.
Layers with a sliding window stay dense. No query block is kept whole for being the last one unless
--dense-last-blocks says so.
"""

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

import quality_policies
import torch
from quality_measures import POSITIONS, compare
from quality_models import Switch, open_model
from quality_tasks import DEPTHS, TASKS, sample, score, wilson
from quality_texts import KINDS, windows
from timing import where, write_rows

# What identifies a row: the rest is what was measured, and where.
KEYS = (
    "row", "model", "policy", "length", "dense_last_blocks", "text", "window", "task", "depth",
    "samples", "dtype", "kernel",
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """What is measured of one model.

    Args:
        selections: Of quality_policies.
        lengths: Tokens of a prompt.
        windows: Disjoint windows of each kind of text.
        tasks, depths, samples: Of retrieval; samples at each depth.
        base: Facts of every row.
    """

    selections: tuple
    lengths: tuple
    windows: int
    tasks: tuple
    depths: tuple
    samples: int
    base: dict


def key_of(row):
    """The part of a row that says what it measures."""
    return tuple(row.get(name) for name in KEYS)


def done_rows(path):
    """Keys of the rows in a JSONL file; none if there is no such file."""
    path = Path(path) if path else None
    if path is None or not path.is_file():
        return set()
    return {key_of(json.loads(line)) for line in path.read_text().splitlines() if line}


@torch.no_grad()
def texts(loaded, switch, plan, done):
    """Yield the rows of text, one dense pass a window for all selections."""
    for length in plan.lengths:
        for kind in KINDS:
            for number, ids in enumerate(windows(loaded.tokenizer, kind, length, plan.windows)):
                facts = {
                    "row": "text", **plan.base, "length": length, "text": kind, "window": number,
                }  # fmt: skip
                rows = [{**facts, "policy": s.name} for s in plan.selections]
                left = [
                    (row, s)
                    for row, s in zip(rows, plan.selections, strict=True)
                    if key_of(row) not in done
                ]
                if not left:
                    continue
                targets = torch.tensor(ids[-POSITIONS:][1:], device=loaded.model.device)
                dense = _logits(loaded.model, ids)
                for row, selection in left:
                    start = time.perf_counter()
                    with switch.using(selection, recall=True) as kept:
                        sparse = _logits(loaded.model, ids)
                    measured = compare(dense, sparse, targets)
                    seconds = time.perf_counter() - start
                    yield {**row, **kept.row(), **measured, "seconds": seconds}


def _logits(model, ids):
    ids = torch.tensor([ids], device=model.device)
    kept = min(POSITIONS, ids.shape[1])
    return model(ids, use_cache=False, logits_to_keep=kept).logits[0]


@torch.no_grad()
def retrieval(loaded, switch, plan, done):
    """Yield the rows of tasks: dense first, then every selection, on the same prompts."""
    for length in plan.lengths:
        for task in plan.tasks:
            depths = plan.depths if task != "words" else (0.0,)
            for depth in depths:
                prompts = None
                for selection in (None, *plan.selections):
                    row = {
                        "row": "task", **plan.base, "length": length, "task": task,
                        "depth": depth, "samples": plan.samples,
                        "policy": "dense" if selection is None else selection.name,
                    }  # fmt: skip
                    if key_of(row) in done:
                        continue
                    prompts = prompts or [
                        sample(task, loaded.tokenizer, length, depth=depth, seed=seed)
                        for seed in range(plan.samples)
                    ]
                    start, scores = time.perf_counter(), []
                    for prompt in prompts:
                        with switch.using(selection) as kept:
                            scores.append(score(_answer(loaded, prompt), prompt.answers))
                    facts = kept.row() if selection is not None else {"density": 1.0}
                    mean = sum(scores) / len(scores)
                    yield {
                        **row, "score": mean, "wilson": wilson(mean, len(scores)),
                        "scores": scores, "density": facts["density"],
                        "seconds": time.perf_counter() - start,
                    }  # fmt: skip


def _answer(loaded, prompt):
    ids = torch.tensor([prompt.ids], device=loaded.model.device)
    out = loaded.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=prompt.new_tokens,
        do_sample=False, pad_token_id=0,
    )  # fmt: skip
    return loaded.tokenizer.decode(out[0, ids.shape[1] :].tolist())


def measure(loaded, switch, plan, *, out=None, on_row=print):
    """Measure what `out` lacks of the plan, and append it there.

    Returns:
        The new rows.
    """
    done, machine, rows = done_rows(out), where(), []
    for part in (texts, retrieval):
        for row in part(loaded, switch, plan, done):
            row = {**machine, **row}
            rows.append(row)
            if out:
                write_rows([row], out)
            on_row(row)
    return rows


def line_of(row):
    """A row in one line for the terminal."""
    head = f"{row['model']} {row['length']:>6} {row['policy']:<36.36}"
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


def count_rows(plan):
    """Rows of a plan where every text has plan.windows windows."""
    depths = sum(1 if task == "words" else len(plan.depths) for task in plan.tasks)
    each = len(plan.selections) * len(KINDS) * plan.windows
    return len(plan.lengths) * (each + depths * (len(plan.selections) + 1))


def parser_of():
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--models", nargs="+", default=["smollm2"], help="smollm2, NAME=PATH, or a path")
    add("--policies", nargs="+", help="default: all; with --quick a few")
    add("--selector", nargs="+", default=[], help="MODULE:FUNCTION, besides --policies")
    add("--lengths", nargs="+", type=int, help="default: 2048 4096 8192; with --quick 2048")
    add("--tasks", nargs="*", choices=TASKS, help="default: all; with --quick single")
    add("--depths", nargs="+", type=float)
    add("--samples", type=int, help="prompts a task and depth; default 20, with --quick 2")
    add("--windows", type=int, help="disjoint windows a kind of text; default 3, with --quick 1")
    add("--dense-last-blocks", type=int, default=0)
    add("--quick", action="store_true", help="the CPU in under ten minutes")
    add("--adapter", help="a .safetensors file of long_context_adapter.py")
    add("--rope-theta", type=float)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", help="default: bfloat16 on CUDA, float32 on the CPU")
    add("--kernel", choices=("flex", "masked"), help="default: flex on CUDA, masked on the CPU")
    add("--out", help="JSONL, appended to; rows in it are not measured again")
    return parser


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
        selections=tuple(quality_policies.parse(n, dense_last_blocks=last) for n in names),
        lengths=tuple(args.lengths or ((2048,) if quick else (2048, 4096, 8192))),
        windows=args.windows or (1 if quick else 3),
        tasks=tuple(tasks),
        depths=tuple(args.depths or ((0.5,) if quick else DEPTHS)),
        samples=args.samples or (2 if quick else 20),
        base=base,
    )


def main():
    """Measure every model, with a progress bar."""
    args = parser_of().parse_args()
    from rich.progress import Progress

    dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    kernel = args.kernel or ("flex" if args.device == "cuda" else "masked")
    for text in args.models:
        loaded = open_model(
            text, device=args.device, dtype=getattr(torch, dtype), adapter=args.adapter,
            rope_theta=args.rope_theta,
        )  # fmt: skip
        plan = plan_of(args, loaded.name, dtype, kernel)
        switch = Switch(loaded.model, kernel=kernel)
        with Progress() as progress:
            bar = progress.add_task(loaded.name, total=count_rows(plan))

            def show(row, progress=progress, bar=bar):
                progress.console.print(line_of(row), highlight=False, soft_wrap=True, markup=False)
                progress.advance(bar)

            measure(loaded, switch, plan, out=args.out, on_row=show)


if __name__ == "__main__":
    main()
