"""One attention layer: selection and sparse kernel against every dense path, on the same inputs.

    python benchmarks/bench_attention.py [--heads NAME ...] [--lengths 8k 32k ...] [--out FILE]
    python benchmarks/bench_attention.py --inputs .carry/FILE.safetensors --lengths 8k 16k
    python benchmarks/bench_attention.py --break-even --heads d64 d128 d256

A row is printed only after what it times matched fp32 attention on four query blocks of that very
input: the sparse result over the blocks that were kept, each dense path over all of them. Columns:
  density, coverage     kept / causal blocks; exact attention mass kept on the audited rows
  route_ms, sparse_ms   selection and sparse kernel with the dense last rows, as CUDA graphs
  total_ms              crisp_flex.sparse_attention, which is both, as a CUDA graph (`timed`)
  launched_ms           the same as called from Python
  kernel_ms             the sparse kernel alone
  sparse_tflops         of that on its blocks, whole blocks counted
  <path>_ms             dense: SDPA (cuDNN, flash), flex with Triton, FA4 (by flex, and its own)
  ratio_sdpa, ratio     the fastest dense SDPA, and the fastest dense path of all, over total_ms
  index_mib             block lists that are alive at once, those of one of head_groups
  sparse_peak_mib, sdpa_peak_mib   allocated beyond q, k, v, result included
--break-even times short lengths against SDPA alone and says from where on sparse wins.
"""

import argparse
import dataclasses
import functools
import itertools
import sys

import torch
from cases import HEADS, Heads, spelled, tokens
from dense import (
    BLOCK,
    MOST_ERROR,
    PATHS,
    dense_paths,
    dense_times,
    flex_options,
    kernel_of,
    relative_error,
    wanted_rows,
)
from inputs import SHARP_TOKENS, load
from targets import break_even, fastest, verdicts
from timing import gpu_time, measure_within, peak_mib, where, write_rows
from torch.nn.attention.flex_attention import flex_attention

import crisp_flex
from crisp_flex import CrispConfig, flex_hop, head_groups, last_rows
from crisp_flex.routing.ops import route as route_op
from crisp_flex.routing.params import STAT_NAMES, RouteParams

# Lengths of --break-even, and its heads: a full card at each head dim.
SHORT = (2048, 3072, 4096, 6144, 8192, 12288, 16384)
CARD = {f"d{D}": Heads(32, 8, D) for D in (64, 128, 256)}


def statistics_of(q, k, v, params):
    """{name: sum or mean over heads} of what the selection says about itself."""
    stats = route_op(q, k, None, params, value=v)[3][0].double()
    stats = dict(zip(STAT_NAMES, stats.unbind(-1), strict=True))
    kept, visible = (float(stats[name].sum()) for name in ("kept_blocks", "visible_blocks"))
    return {"kept": kept, "density": kept / visible, "coverage": float(stats["coverage"].mean())}


def tflops(blocks, block_size, D, milliseconds):
    """TFLOP/s of two matrix products over whole blocks."""
    return 4 * D * block_size[0] * block_size[1] * blocks / milliseconds / 1e9


def bench_parts(inputs, config, kernel, rows, args):
    """Selection and kernel by themselves: their times, and fp32 attention over what was kept."""
    q, k, v = inputs.query, inputs.key, inputs.value
    params = RouteParams.from_config(config, D=q.shape[3])
    block_mask = crisp_flex.route(q, k, config, value=v)
    wanted = wanted_rows(q, k, v, rows, block_mask)
    options = flex_options(kernel, q, config.tokens_per_block)
    compiled = torch.compile(flex_attention, dynamic=False)

    listed, apart = config, last_rows.are_apart(q, k, v, config)
    if apart:  # as sparse_attention does it: the last rows are a call of their own
        listed = dataclasses.replace(config, dense_last_blocks=0)
        block_mask = crisp_flex.route(q, k, listed, value=v)

    def flex():
        return compiled(q, k, v, block_mask=block_mask, enable_gqa=True, kernel_options=options)

    def sparse():
        out = flex()
        if apart:
            numbers = (config.tokens_per_block[0], config.dense_last_blocks)
            torch.ops.crisp_flex.write_last_rows(out, q, k, v, q.shape[3] ** -0.5, *numbers)
        return out

    check(relative_error(sparse(), wanted, rows), f"sparse kernel {kernel}")
    stats = statistics_of(q, k, v, params)
    budget_ms = 1e3 * args.budget
    route_ms, _ = gpu_time(lambda: route_op(q, k, None, params, value=v), budget_ms=budget_ms)
    sparse_ms, _ = gpu_time(sparse, budget_ms=budget_ms)
    kernel_ms, _ = gpu_time(flex, budget_ms=budget_ms)
    kept = statistics_of(q, k, v, RouteParams.from_config(listed, D=q.shape[3]))["kept"]
    return wanted, {
        "density": stats["density"], "coverage": stats["coverage"], "route_ms": route_ms,
        "sparse_ms": sparse_ms, "kernel_ms": kernel_ms,
        "sparse_tflops": tflops(kept, config.tokens_per_block, q.shape[3], kernel_ms),
    }  # fmt: skip


class NotTimed(Exception):
    """A result is not what it should be."""


def check(error, what):
    """Go no further unless a result is what it should be, within half precision."""
    if not error < MOST_ERROR:
        raise NotTimed(f"{what}: relative error {error:.2e}, not timed")


def bench_dense(inputs, rows, args):
    """Times of all dense paths, peak memory of the fastest SDPA: the same for every kernel."""
    q, k, v = inputs.query, inputs.key, inputs.value
    paths = dense_paths(q, k, v, args.skip)
    times = dense_times(paths, wanted_rows(q, k, v, rows), rows, budget_ms=1e3 * args.budget)
    sdpa, _ = fastest(times, ("sdpa",))
    return {**times, "sdpa_peak_mib": peak_mib(paths[sdpa])}


def bench(name, inputs, config, dense, args):
    """One row about one input; dense: what bench_dense said about it, filled in if empty."""
    q, k, v = inputs.query, inputs.key, inputs.value
    (_, Hq, L, D), Hkv = q.shape, k.shape[1]
    kernel = kernel_of(q, config)
    rows = sorted({0, (N := -(-L // BLOCK)) // 3, N // 2, N - 1})
    row = {
        "row": "attention", **inputs.facts, "heads": name, "shape": f"{Hq}/{Hkv} D {D}",
        "length": L, "policy": config.policy, "kernel": kernel,
        "block_kv": config.tokens_per_block[1],
    }  # fmt: skip
    wanted, parts = bench_parts(inputs, config, kernel, rows, args)
    total = functools.partial(crisp_flex.sparse_attention, q, k, v, config=config)
    error = relative_error(total(), wanted, rows)
    check(error, "sparse_attention")
    row |= parts | {"error": f"{error:.1e}", "sparse_peak_mib": peak_mib(total)}
    budget = {"budget_ms": 1e3 * args.budget}
    groups = head_groups.count_groups_of(
        q, k, v, block_size=config.tokens_per_block, has_key_valid=False
    )
    table = head_groups.table_bytes(
        Hq // groups, Lq=L, Lkv=L, block_size=config.tokens_per_block, has_key_valid=False
    )
    row |= {"head_groups": groups, "index_mib": table / 2**20}
    row["total_ms"], row["timed"] = gpu_time(total, **budget)
    row["launched_ms"] = measure_within(total, **budget)[0]
    if not dense:
        dense.update(bench_dense(inputs, rows, args))
    (_, sdpa_ms), (_, dense_ms) = fastest(dense, ("sdpa",)), fastest(dense)
    row |= dense | {
        "inputs_mib": sum(x.nbytes for x in (q, k, v)) / 2**20,
        "kv_mib": (k.nbytes + v.nbytes) / 2**20,
        "dense_tflops": tflops(Hq * N * (N + 1) / 2, (BLOCK, BLOCK), D, dense_ms),
        "ratio_sdpa": sdpa_ms / row["total_ms"],
        "ratio": dense_ms / row["total_ms"],
    }
    return {name: round(x, 4) if isinstance(x, float) else x for name, x in row.items()}


def bench_short(name, inputs, config, args):
    """One row about one short input: the total against SDPA, as graphs and as called."""
    q, k, v = inputs.query, inputs.key, inputs.value
    stats = statistics_of(q, k, v, RouteParams.from_config(config, D=q.shape[3]))
    total = functools.partial(crisp_flex.sparse_attention, q, k, v, config=config)
    rows = [0, q.shape[2] // BLOCK - 1]
    block_mask = crisp_flex.route(q, k, config, value=v)
    wanted = wanted_rows(q, k, v, rows, block_mask)
    check(relative_error(total(), wanted, rows), f"{name} {q.shape[2]}")
    row = {
        "row": "break-even", **inputs.facts, "heads": name, "length": q.shape[2],
        "policy": config.policy, "backend": config.backend, "density": round(stats["density"], 4),
    }  # fmt: skip
    paths = {n: call for n, call in dense_paths(q, k, v, args.skip).items() if n[:4] == "sdpa"}
    budget = {"budget_ms": 1e3 * args.budget}
    for path, call in {"total": total, **paths}.items():
        try:
            graph, row["timed"] = gpu_time(call, **budget)
            row[f"{path}_ms"] = round(graph, 4)
            row[f"{path}_launched_ms"] = round(measure_within(call, **budget)[0], 4)
        except RuntimeError as failure:
            print(f"  {path} does not run: {str(failure).splitlines()[0][:90]}")
    return row


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    shapes = {**HEADS, **CARD}
    parser.add_argument(
        "--inputs", default="structured", help='"structured", "columns" or a file of capture_qk.py'
    )
    parser.add_argument("--share", type=float, help="density that structured inputs aim at")
    parser.add_argument(
        "--sharp-tokens", type=int, default=SHARP_TOKENS, help="structured inputs: see inputs.py"
    )
    parser.add_argument("--heads", nargs="+", default=["llama-3.1-8b"], choices=shapes)
    parser.add_argument("--lengths", nargs="+", default=["8k", "32k"], type=tokens)
    parser.add_argument("--policy", default="hybrid")
    parser.add_argument("--preset", default="balanced")
    parser.add_argument("--backends", nargs="+", default=["auto"])
    parser.add_argument("--skip", nargs="+", default=[], choices=PATHS, help="dense paths")
    parser.add_argument("--budget", type=float, default=2.0, help="seconds of repeats per figure")
    parser.add_argument("--break-even", action="store_true", help="short lengths, total and SDPA")
    parser.add_argument("--device", default=None, help="default: cuda where there is one")
    parser.add_argument("--out", default=None, help="append rows as JSON lines")
    args = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64
    lengths = SHORT if args.break_even else args.lengths
    from_file = args.inputs not in ("structured", "columns")
    done, wrong = [], 0
    with torch.no_grad():
        for name, length in itertools.product(["captured"] if from_file else args.heads, lengths):
            inputs = load(
                args.inputs, shapes.get(name), length, share=args.share,
                sharp_tokens=args.sharp_tokens, device=args.device,
            )  # fmt: skip
            dense = {}
            for backend in args.backends:
                config = CrispConfig.preset(
                    args.preset, policy=args.policy, backend=backend, min_seqlen=1
                )
                config = flex_hop.settle(config, inputs.query, inputs.value, captures=False)
                try:
                    if args.break_even:
                        row = bench_short(name, inputs, config, args)
                    else:
                        torch._dynamo.reset()  # static shapes, as in a model's first graph
                        row = bench(name, inputs, config, dense, args)
                except NotTimed as error:
                    print(f"{name} {spelled(length)} {backend}: {error}", flush=True)
                    wrong += 1
                    continue
                row["preset"] = args.preset
                print(row, flush=True)
                done.append(row)
                if args.out:
                    write_rows([{**where(), **row}], args.out)
            del inputs
    for line in break_even(done) if args.break_even else verdicts(done):
        print(line)
    if wrong:
        sys.exit(f"{wrong} results were wrong and not timed")


if __name__ == "__main__":
    main()
