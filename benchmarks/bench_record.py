"""What recording costs: a prompt with nobody recording, recorded, and recorded with an audit.

    python benchmarks/bench_record.py [--length 32k] [--layers 4] [--audit 4] [--out FILE]

One model (small_llama.py, 8B-like widths), one prompt, in turns, medians over the rounds:
  none   as if there were no recording: no watcher in the op, no wrapper around the graph
  off    the package as it is, outside of record()
  on     inside record(): what the model pays, its rows are read after the round
  read   a record() of its own around each call, so that reading the rows counts
  audit  as `read`, with --audit query blocks a layer measured
Each has its overhead over `none`. Before anything is timed all give the same logits, and a record
has a row a layer. Targets (issue 6): off nothing that can be measured, on less than 1 % at 32k.
"""

import argparse
import contextlib

import torch
from bench_prefill import inputs_of
from cases import spelled, tokens
from small_llama import add_widths, build, widths_of
from timing import in_turns, medians, where, write_rows

import crisp_flex
from crisp_flex import CrispConfig, CrispFlexBackend, backend
from crisp_flex.routing import ops

MOST_ON, ON_TOKENS = 0.01, 32768


@contextlib.contextmanager
def swapped(module, **names):
    """While active, the module's names have other values."""
    before = {name: getattr(module, name) for name in names}
    try:
        for name, value in names.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def without_watcher():
    """While active, the op looks for nobody who watches."""
    return swapped(ops, _shown=lambda *fields: fields[-1])


def compiled(model, config, arguments):
    """The model compiled anew, and called once."""
    fn = torch.compile(model, backend=CrispFlexBackend(config), dynamic=False)
    fn(*arguments)
    return fn


def cases_of(model, config, arguments, audit):
    """{name: (a context for a round, a call that returns the last logits)}."""
    torch._dynamo.reset()
    with swapped(backend, tracked=lambda graph, *_: graph):
        bare = compiled(model, config, arguments)
    whole = compiled(model, config, arguments)
    for fn, known in ((bare, False), (whole, True)):
        with crisp_flex.record() as found:
            fn(*arguments)
        if any((row.run >= 0) != known for row in found.rows):
            raise SystemExit("the graph without a wrapper has one, or the other has none")

    def off():
        return whole(*arguments)[0]

    def recorded(blocks):
        with crisp_flex.record(audit=blocks) as found:
            logits = off()
        if len(found.rows) != len(model.layers):
            raise SystemExit(f"{len(found.rows)} rows of {len(model.layers)} layers, not timed")
        return logits

    nothing = contextlib.nullcontext
    return {
        "none": (without_watcher, lambda: bare(*arguments)[0]),
        "off": (nothing, off),
        "on": (crisp_flex.record, off),
        "read": (nothing, lambda: recorded(0)),
        "audit": (nothing, lambda: recorded(audit)),
    }


def bench(cases, rounds, repeats):
    """{name: milliseconds}, medians over rounds in which the cases take turns."""
    results = {}
    for name, (context, call) in cases.items():
        with context():
            results[name] = call()
    for name, result in results.items():
        if not torch.equal(result, results["none"]):
            raise SystemExit(f"the logits of {name} are not those of none, not timed")
    within, calls = ({name: case[i] for name, case in cases.items()} for i in range(2))
    return medians(in_turns(calls, rounds=rounds, repeats=repeats, within=within))


def verdict(row):
    """The overheads as a line, held against the target where it applies."""
    shares = ", ".join(
        f"{name} {row[f'{name}_overhead']:+.2%}" for name in ("off", "on", "read", "audit")
    )
    mark = "      "
    if row["length"] >= ON_TOKENS:
        mark = "met   " if row["on_overhead"] < MOST_ON else "MISSED"
    return f"{mark} {spelled(row['length'])}: none {row['none_ms']:.2f} ms; {shares}"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--length", default=32768, type=tokens)
    add_widths(parser)
    parser.add_argument("--preset", default="balanced")
    parser.add_argument("--audit", type=int, default=4, help="query blocks a layer")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", default=None, help="append the row as a JSON line")
    args = parser.parse_args()
    w = widths_of(args)
    dtype = torch.bfloat16 if args.device.startswith("cuda") else torch.float32
    model = build(w, device=args.device, dtype=dtype)
    arguments = inputs_of(model, args.length, 0, w, args.device)
    config = CrispConfig.preset(args.preset, min_seqlen=min(args.length, 8192))
    with torch.no_grad():
        times = bench(cases_of(model, config, arguments, args.audit), args.rounds, args.repeats)
    row = {
        "row": "record", "length": args.length, "layers": w.layers, "audit": args.audit,
        "shape": f"{w.Hq}/{w.Hkv} D {w.D}, hidden {w.hidden}",
        **{f"{name}_ms": round(time, 4) for name, time in times.items()},
        **{
            f"{name}_overhead": round(time / times["none"] - 1, 5)
            for name, time in times.items() if name != "none"
        },
    }  # fmt: skip
    print(row)
    print(verdict(row))
    if args.out:
        write_rows([{**where(), **row}], args.out)


if __name__ == "__main__":
    main()
