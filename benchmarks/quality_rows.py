"""The rows of quality.py: what is measured of one model, once each."""

import contextlib
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from quality_measures import POSITIONS, compare
from quality_tasks import sample, score, wilson
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
    """Yield the rows of text and routing, one dense pass a window for all of them."""
    for length in plan.lengths:
        for kind in KINDS:
            for number, ids in enumerate(windows(loaded.tokenizer, kind, length, plan.windows)):
                facts = {
                    "row": "text", **plan.base, "length": length, "text": kind, "window": number,
                }  # fmt: skip
                left = [
                    (row, chosen)
                    for chosen in plan.selections
                    if key_of(row := {**facts, "policy": chosen.name}) not in done
                ]
                # one map a text: it hardly changes from window to window
                route = {**facts, "row": "routing"}
                route = route if number == 0 and key_of(route) not in done else None
                if not left and route is None:
                    continue
                start = time.perf_counter()
                with switch.observing() if route else contextlib.nullcontext() as routing:
                    dense = _logits(loaded.model, ids)
                if route:
                    yield {**route, **routing.row(), "seconds": time.perf_counter() - start}
                targets = torch.tensor(ids[-POSITIONS:][1:], device=loaded.model.device)
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
                    start, scores, densities = time.perf_counter(), [], []
                    for prompt in prompts:
                        with switch.using(selection) as kept:
                            scores.append(score(_answer(loaded, prompt), prompt.answers))
                        densities.append(kept.row()["density"] if selection is not None else 1.0)
                    mean = statistics.fmean(scores)
                    yield {
                        **row, "score": mean, "wilson": wilson(mean, len(scores)),
                        "scores": scores, "density": statistics.fmean(densities),
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


def count_rows(plan):
    """Rows of a plan where every text has plan.windows windows."""
    depths = sum(1 if task == "words" else len(plan.depths) for task in plan.tasks)
    each = len(KINDS) * (len(plan.selections) * plan.windows + 1)
    return len(plan.lengths) * (each + depths * (len(plan.selections) + 1))
