"""The selections under trial on single layers: density against the error of the layer's output.

    python benchmarks/trials/layers.py --model smol.gguf --length 4096 --out x.jsonl

A proxy for trial.py where no GPU is at hand: q, k, v of a dense prompt step are kept, and every
variant is run on them. error: norm of the output's error over the output's norm, over one query
block of five and all heads.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from attention import Sums, attend, sampled_rows
from capture_qk import attention as windowed
from selection import select
from variants import VARIANTS

from crisp_flex.demo.model import load
from crisp_flex.demo.prompt import text_ids

# Of the query blocks, one in so many is compared.
EVERY = 5


class Done(Exception):
    """The last wanted layer was captured."""


def captured(model, ids, layers):
    """{layer: (q, k, v, scale)} of one dense prompt step."""
    from transformers import AttentionInterface

    kept = {}

    def keep(module, query, key, value, attention_mask, scaling, sliding_window=None, **_):
        if module.layer_idx in layers:
            kept[module.layer_idx] = (query[0], key[0], value[0], scaling)
            if module.layer_idx == max(layers):
                raise Done
        out = windowed(query, key, value, scaling, sliding_window)
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register("trial-layers", keep)
    model.set_attn_implementation("trial-layers")
    with contextlib.suppress(Done):
        model.base_model(torch.tensor([ids]), use_cache=False)
    return kept


@torch.no_grad()
def main():
    """Print one row per variant: its density and error, mean over the layers and each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", default="code", choices=("code", "prose"))
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 9, 16, 23])
    parser.add_argument("--only", nargs="+", help="variants whose name holds one of these")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    loaded = load(args.model, device="cpu", dtype=torch.float32)
    ids = text_ids(loaded.tokenizer, args.text, args.length)
    inputs = captured(loaded.model, ids, args.layers)
    del loaded
    exact = {
        layer: sampled_rows(windowed(q[None], k[None], v[None], scale, None)[0], EVERY)
        for layer, (q, k, v, scale) in inputs.items()
    }
    with args.out.open("a") as out:
        for variant in VARIANTS:
            if args.only and not any(o in variant.name for o in args.only):
                continue
            start, rows = time.perf_counter(), {}
            for layer, (q, k, v, scale) in inputs.items():
                sums = Sums()
                got = attend(q, k, v, scale, select(q, k, v, scale, variant), sums, EVERY)
                error = float((got - exact[layer]).norm() / exact[layer].norm())
                rows[layer] = {**sums.row(), "error": error}
            mean = {x: sum(r[x] for r in rows.values()) / len(rows) for x in ("density", "error")}
            row = {"variant": variant.name, "text": args.text, "length": args.length, **mean}
            out.write(json.dumps({**row, "layers": rows}) + "\n")
            out.flush()
            each = " ".join(f"{r['density']:.2f}/{r['error']:.3f}" for r in rows.values())
            seconds = time.perf_counter() - start
            head = f"{variant.name:40s} {mean['density']:.3f} {mean['error']:.3f}"
            print(f"{head}  {each}  {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
