"""Selections under trial in whole models: density, KL, top-1 and recall against dense.

    python benchmarks/trials/trial.py --models smol.gguf:8192 gemma.gguf:16384 --device cuda \\
        --deadline 230 --out trial.jsonl [--only NAME ...]

Each row: the variant; density (key tokens kept per query block over those visible, layers without
a window), cost (with the pooled keys), recall (mean mass kept), kl and top1 over the last 1024
positions. No dense last block. Variants run in the order of variants.py, each on all texts, and a
row is written as soon as it is there.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))

from attention import Sums, attend
from capture_qk import attention as windowed
from selection import select
from variants import VARIANTS, Variant

from crisp_flex.demo.model import load
from crisp_flex.demo.prompt import text_ids

POSITIONS = 1024


@dataclass(slots=True)
class Now:
    """What the attention function does at the moment: variant None is dense."""

    variant: Variant | None = None
    sums: Sums | None = None


def install(model) -> Now:
    """Make the model's attention ask the returned object."""
    from transformers import AttentionInterface

    now = Now()

    def trial(module, query, key, value, attention_mask, scaling, sliding_window=None, **_):
        L = query.shape[2]
        window = sliding_window if sliding_window and sliding_window < L else None
        if now.variant is None or window is not None:
            out = windowed(query, key, value, scaling, window)
        else:
            q, k, v = (x[0].float() for x in (query, key, value))
            chosen = select(q, k, v, scaling, now.variant)
            out = attend(q, k, v, scaling, chosen, now.sums)[None].to(query.dtype)
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register("trial", trial)
    model.set_attn_implementation("trial")
    return now


def log_probabilities(model, ids):
    """[POSITIONS, vocabulary] fp32 on the last positions."""
    kept = min(POSITIONS, len(ids))
    out = model(torch.tensor([ids], device=model.device), use_cache=False, logits_to_keep=kept)
    return F.log_softmax(out.logits[0].float(), -1)


@dataclass(frozen=True, slots=True)
class Column:
    """One model on one text, with its dense answer."""

    model: object
    now: Now
    facts: dict
    ids: list[int]
    dense: torch.Tensor

    def measure(self, variant: Variant) -> dict:
        """A row of the results."""
        start = time.perf_counter()
        self.now.variant, self.now.sums = variant, Sums()
        got = log_probabilities(self.model, self.ids)
        self.now.variant = None
        dense = self.dense.to(got.device).float()
        kl = (dense.exp() * (dense - got)).sum(-1).mean()
        top1 = (dense.argmax(-1) == got.argmax(-1)).float().mean()
        return {
            **self.facts, **self.now.sums.row(), "kl": float(kl), "top1": float(top1),
            "seconds": time.perf_counter() - start,
        }  # fmt: skip


def columns(args):
    """The columns of the table, one model after the other."""
    for source in args.models:
        path, _, length = source.rpartition(":")
        loaded = load(path, device=args.device, dtype=torch.float32)
        now = install(loaded.model)
        for text in args.texts:
            ids = text_ids(loaded.tokenizer, text, int(length))
            dense = log_probabilities(loaded.model, ids)
            facts = {"model": loaded.name, "text": text, "length": int(length)}
            yield Column(loaded.model, now, facts, ids, dense)


@torch.no_grad()
def main():
    """Run the variants until the deadline."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", nargs="+", required=True, help="PATH:LENGTH")
    parser.add_argument("--texts", nargs="+", default=["code", "prose"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="+", help="variants whose name holds one of these")
    parser.add_argument("--deadline", type=float, default=1e9, help="seconds from the start")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    start = time.perf_counter()
    torch.set_float32_matmul_precision("high")
    variants = [v for v in VARIANTS if not args.only or any(o in v.name for o in args.only)]
    ready = list(columns(args))
    print(f"{len(variants)} variants x {len(ready)} columns, {time.perf_counter() - start:.0f} s")
    slowest = 0.0
    with args.out.open("a") as out:
        for i, variant in enumerate(variants):
            if time.perf_counter() - start + slowest > args.deadline:
                print(f"deadline: {len(variants) - i} variants left")
                break
            begun, shown = time.perf_counter(), []
            for column in ready:
                row = column.measure(variant)
                out.write(json.dumps({"variant": variant.name, **row, **asdict(variant)}) + "\n")
                out.flush()
                shown.append(f"{row['density']:.3f}/{row['kl']:.4f}")
            slowest = max(slowest, time.perf_counter() - begun)
            at = time.perf_counter() - start
            print(f"{at:4.0f} s {i + 1:2d}/{len(variants)} {variant.name:40s}", *shown, flush=True)


if __name__ == "__main__":
    main()
