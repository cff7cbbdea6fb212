"""A whole model's prompt and decode steps: crisp_flex against plain torch.compile, in turns.

    python benchmarks/bench_prefill.py [--lengths 8k 32k] [--layers 4] [--out FILE]   prefill
    python benchmarks/bench_prefill.py --short [--out FILE]                           short calls

Prefill: seconds of a prompt at each length, the ratio, the share of blocks kept and the peak memory
of both. --short: prompts below min_seqlen and a decode step, which crisp_flex leaves dense and
which may cost at most 3 % more. Each row is a model compiled anew, of static shapes; --one-model
compiles once, runs the longest prompt first, and then all lengths on what is compiled by then.
Before it is timed, a short call's logits must equal the plain model's, a long one's be close.
The model: small_llama.py, 8B-like widths.
"""

import argparse

import torch
from cases import spelled, tokens
from small_llama import add_widths, build, rotations, topic_prompt, widths_of
from timing import in_turns, measure, medians, peak_mib, where, write_rows

from crisp_flex import CrispConfig, CrispFlexBackend
from crisp_flex.routing.ops import observe
from crisp_flex.routing.params import STAT_NAMES

SHORT = (512, 1024, 4096)
# Rows of --short may cost this much more than plain torch.compile (issue 3).
MOST_SLOWER = 0.03
# Relative error of the last logits of a call that is dense in both.
MOST_ERROR_DENSE = 1e-2


def inputs_of(model, length, decode, w, device):
    """Arguments of the model: a prompt of `length`, or one token after a cache of it."""
    ids = topic_prompt(length + decode, device=device)
    if not decode:
        return ids, *rotations(0, length, w.D, device), None
    dtype = model.head.weight.dtype
    g = torch.Generator(device).manual_seed(1)
    caches = [
        tuple(
            torch.randn(1, w.Hkv, length, w.D, generator=g, device=device).to(dtype)
            for _ in range(2)
        )
        for _ in range(w.layers)
    ]
    return ids[:, -1:], *rotations(length, 1, w.D, device), caches


def density(call):
    """Kept / visible blocks of all layers of one call; None where nothing ran sparsely."""
    sums = torch.zeros(2, dtype=torch.float64)

    def note(_index, _counts, _buffer, _full_counts, stats):
        columns = [STAT_NAMES.index(name) for name in ("kept_blocks", "visible_blocks")]
        sums.add_(stats[..., columns].double().sum((0, 1)).cpu())

    with observe(note):
        call()
    return float(sums[0] / sums[1]) if sums[1] else None


def bench(model, compiled, length, decode, w, args):
    """One row: both compiled models on one input."""
    arguments = inputs_of(model, length, decode, w, args.device)
    calls = {name: (lambda fn=fn: fn(*arguments)) for name, fn in compiled.items()}
    plain, ours = (calls[name]()[0].double() for name in ("plain", "crisp_flex"))
    error = float((ours - plain).norm() / plain.norm())
    kept = density(calls["crisp_flex"])
    if kept is None and not error < MOST_ERROR_DENSE:
        raise SystemExit(f"{length}: dense in both, relative error {error:.2e}, not timed")
    peaks = {f"{name}_peak_mib": round(peak_mib(call), 1) for name, call in calls.items()}
    for call in calls.values():
        measure(call, warmup=2, repeats=1)
    times = medians(in_turns(calls, rounds=args.rounds, repeats=args.repeats))
    return {
        "row": "short" if kept is None else "prefill", "length": length,
        "step": "decode" if decode else "prompt", "layers": w.layers,
        "shape": f"{w.Hq}/{w.Hkv} D {w.D}, hidden {w.hidden}", "backend": args.backend,
        "min_seqlen": args.min_seqlen, "one_model": args.one_model,
        "density": None if kept is None else round(kept, 4), "logits_error": f"{error:.1e}",
        **{f"{name}_ms": round(x, 4) for name, x in times.items()},
        "ratio": round(times["plain"] / times["crisp_flex"], 4), **peaks,
    }  # fmt: skip


def fresh(model, args):
    """The model compiled plainly and by crisp_flex, with nothing compiled yet."""
    torch._dynamo.reset()
    settings = {} if args.min_seqlen is None else {"min_seqlen": args.min_seqlen}
    config = CrispConfig.preset(args.preset, backend=args.backend, **settings)
    return {
        "plain": torch.compile(model),
        "crisp_flex": torch.compile(model, backend=CrispFlexBackend(config)),
    }


def verdict(row):
    """What the row says about its target."""
    if row["row"] == "short":
        slower = row["crisp_flex_ms"] / row["plain_ms"] - 1
        mark = "met   " if slower <= MOST_SLOWER else "MISSED"
        return f"{mark} {row['step']} {row['length']}: {slower:+.1%} against torch.compile"
    return (
        f"       prompt of {row['length']}: {row['plain_ms']:.2f} / {row['crisp_flex_ms']:.2f} ms "
        f"= {row['ratio']:.2f}x at {row['density']:.1%}"
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--short", action="store_true", help="512, 1k, 4k, and a decode step")
    parser.add_argument("--lengths", nargs="+", default=[8192, 32768], type=tokens)
    add_widths(parser)
    parser.add_argument("--preset", default="balanced")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--min-seqlen", type=int, default=None, help="default: CrispConfig's")
    parser.add_argument("--one-model", action="store_true", help="compile once for all lengths")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", default=None, help="append rows as JSON lines")
    args = parser.parse_args()
    w = widths_of(args)
    dtype = torch.bfloat16 if args.device.startswith("cuda") else torch.float32
    model = build(w, device=args.device, dtype=dtype)
    lengths = SHORT if args.short else args.lengths
    steps = [(length, 0) for length in lengths] + ([(max(lengths), 1)] if args.short else [])
    compiled, said = fresh(model, args), []
    with torch.no_grad():
        if args.one_model:
            longest = inputs_of(model, max(args.lengths), 0, w, args.device)
            for fn in compiled.values():
                fn(*longest)
        for length, decode in steps:
            if not args.one_model:
                compiled = fresh(model, args)
            row = bench(model, compiled, length, decode, w, args)
            print(f"{spelled(length)}: {row}", flush=True)
            said.append(verdict(row))
            if args.out:
                write_rows([{**where(), **row}], args.out)
    print("\n".join(said))


if __name__ == "__main__":
    main()
