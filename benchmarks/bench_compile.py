"""Compile time of a 32-layer Llama-shaped random model: first call with a cold and a warm cache.

    python benchmarks/bench_compile.py [--length 8192] [--backend auto] [--out FILE]

Each measurement is a fresh process, so that nothing but Inductor's cache folder is shared.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time

from cases import COMPILE_MODEL
from timing import where, write_rows


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=COMPILE_MODEL["num_hidden_layers"])
    parser.add_argument("--backend", default="auto")
    parser.add_argument(
        "--plain", action="store_true", help="torch.compile with Inductor, for comparison"
    )
    parser.add_argument("--out", default=None)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(first_call(args)))
        return
    with tempfile.TemporaryDirectory() as cache:
        for state in ("cold", "warm"):
            row = {"row": "compile", "cache": state, **child(cache)}
            print(row, flush=True)
            if args.out:
                write_rows([{**where(), **row}], args.out)


def child(cache):
    import os

    run = subprocess.run(
        [sys.executable, __file__, *sys.argv[1:], "--child"],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache},
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return json.loads(run.stdout.strip().splitlines()[-1])


def first_call(args):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import crisp_flex

    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = LlamaConfig(**{**COMPILE_MODEL, "num_hidden_layers": args.layers})
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.bfloat16 if device == "cuda" else None).eval()
    ids = torch.randint(0, 1000, (1, args.length), device=device)
    if args.plain:
        model.compile()
    else:
        crisp_flex.compile(model, crisp_flex.CrispConfig(min_seqlen=1024, backend=args.backend))
    with torch.no_grad():
        start = time.perf_counter()
        model(ids, logits_to_keep=1)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        start = time.perf_counter()
        model(ids, logits_to_keep=1)
        if device == "cuda":
            torch.cuda.synchronize()
        again = time.perf_counter() - start
    sites = [] if args.plain else [s for r in crisp_flex.reports(model) for s in r.sites]
    return {
        "layers": args.layers, "length": args.length,
        "compiler": "inductor" if args.plain else "crisp_flex",
        "kernel": sites[0].kernel if sites else "",
        "rewritten": sum(s.rewritten for s in sites),
        "first_call_s": round(seconds, 2), "second_call_s": round(again, 3),
    }  # fmt: skip


if __name__ == "__main__":
    main()
