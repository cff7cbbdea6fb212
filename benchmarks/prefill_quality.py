"""What sparse prefill costs in quality on a real model: KL, top-1 agreement, the pass key, density.

    python benchmarks/prefill_quality.py [--model PATH] [--device cuda] [--length 4096] [--out FILE]

Rows, one JSON line each:
  dense-policy  logits of policy="dense" against the uncompiled model, at 1k and at --length
  kl            mean KL(dense || sparse) over the last 1024 positions, for code and for prose, with
                and without the dense last block
  passkey       the pass key at three depths, dense and sparse
"""

import argparse

import torch
from timing import where, write_rows

import crisp_flex
from crisp_flex import CrispConfig
from crisp_flex.demo.measure import answer, kl, prompt_step, top1_agreement
from crisp_flex.demo.model import load
from crisp_flex.demo.prompt import passkey_prompt, text_ids

POSITIONS = 1024
DEPTHS = (0.1, 0.5, 0.9)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", help="folder, .gguf file or id; default SmolLM2-135M-Instruct")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--dtype", default=None, help="default: bfloat16 on CUDA, float32 on the CPU"
    )
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--preset", default="balanced")
    parser.add_argument("--policy", default="hybrid")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype or ("bfloat16" if args.device == "cuda" else "float32"))
    loaded = load(args.model, device=args.device, dtype=dtype)
    model, tokenizer = loaded.model, loaded.tokenizer
    base = {
        **where(), "model": loaded.name, "dtype": str(dtype).removeprefix("torch."),
        "policy": args.policy, "preset": args.preset,
    }  # fmt: skip
    rows = []

    def emit(**row):
        rows.append({**base, **row})
        print(row, flush=True)
        if args.out:
            write_rows(rows[-1:], args.out)

    texts = {kind: text_ids(tokenizer, kind, args.length) for kind in ("code", "prose")}
    prompts = {depth: passkey_prompt(tokenizer, args.length, depth=depth) for depth in DEPTHS}
    short = texts["code"][:1024]
    dense = {kind: prompt_step(model, ids, POSITIONS)[0] for kind, ids in texts.items()}
    dense_short = prompt_step(model, short, POSITIONS)[0]
    found = {depth: _found(model, tokenizer, prompt) for depth, prompt in prompts.items()}

    def sparse(**settings):
        torch._dynamo.reset()
        config = CrispConfig.preset(
            args.preset,
            **{"policy": args.policy, "min_seqlen": 512, "backend": args.backend, **settings},
        )
        return crisp_flex.compile(model, config)

    compiled = sparse(policy="dense")
    for ids, want in (
        (short, dense_short),
        (texts["code"], dense["code"]),
    ):
        got = prompt_step(compiled, ids, POSITIONS)[0]
        emit(
            row="dense-policy", length=len(ids), kl=kl(want, got), top1=top1_agreement(want, got),
            max_abs=float((got.float() - want.float()).abs().max()),
            max_rel=float((got.float() - want.float()).norm() / want.float().norm()),
        )  # fmt: skip
    for last_blocks in (1, 0):
        compiled = sparse(dense_last_blocks=last_blocks)
        for kind, ids in texts.items():
            with crisp_flex.record(model=compiled) as recorded:
                got = prompt_step(compiled, ids, POSITIONS)[0]
            emit(
                row="kl", text=kind, length=len(ids), dense_last_blocks=last_blocks,
                kl=kl(dense[kind], got), top1=top1_agreement(dense[kind], got),
                density=recorded.density,
            )  # fmt: skip
        if last_blocks == 0:
            continue
        for depth, prompt in prompts.items():
            emit(
                row="passkey", length=args.length, depth=depth, dense=found[depth],
                sparse=_found(compiled, tokenizer, prompt),
            )  # fmt: skip


def _found(model, tokenizer, prompt):
    reply = answer(model, prompt.ids, positions=1)
    return prompt.answer in tokenizer.decode(reply.ids)


if __name__ == "__main__":
    main()
