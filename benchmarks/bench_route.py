"""Time of each routing stage of policy "hybrid" against its floors in bytes and in operations.

    python benchmarks/bench_route.py [--heads NAME ...] [--lengths 8k 32k 128k] [--out FILE]

Timed only after the kernels kept the blocks of the eager reference on a shorter prompt of the same
heads, but for blocks at their thresholds. Floors: --bandwidth for what has to be read and written
once, --matmul for the dots of the probe in half precision, --fp32 for those of the pooled map,
--exp2 for the probe's exponentials. `whole_graph` replays the launches as a CUDA graph, so without
the time that Python takes to launch them.
"""

import argparse
import contextlib
import sys
from unittest.mock import patch

import torch
import triton
from cases import HEADS, LENGTHS
from inputs import columns
from timing import measure, where, write_rows

from crisp_flex import CrispConfig
from crisp_flex.routing import reference
from crisp_flex.routing.kernels.audit import audit
from crisp_flex.routing.kernels.layout import Layout
from crisp_flex.routing.kernels.masses import masses
from crisp_flex.routing.kernels.pool import pool_split
from crisp_flex.routing.kernels.probe import probe
from crisp_flex.routing.kernels.route import route
from crisp_flex.routing.kernels.select import select
from crisp_flex.routing.kernels.stats import stats
from crisp_flex.routing.params import STAT_NAMES, RouteParams

CHECKED_TOKENS = 4096 + 37
# the modules behind the launchers of the same names
probe_module, masses_module, audit_module, select_module = (
    sys.modules[f.__module__] for f in (probe, masses, audit, select)
)
# Share of kept blocks that may differ, all of them at their thresholds (the tests look at each).
DIFFERING_BLOCKS = 1e-3


STAGES = ("pool", "probe", "masses", "audit", "select", "stats")


def check(name, params):
    """Stop unless the kernels keep what the reference keeps."""
    q, k, _ = columns(HEADS[name], CHECKED_TOKENS)
    got, want = (f(q, k, None, params) for f in (route, reference.route))
    difference = (got[3] - want[3]).abs().amax((0, 1))
    allowed = DIFFERING_BLOCKS * want[3][..., 0].max()
    if difference[0] > allowed or difference[1] or difference[2] > 1e-5 or difference[4]:
        raise SystemExit(f"{name}: statistics differ by {difference.tolist()}, not timed")


def floors(layout, params, mass_bytes, list_entries, args):
    """Milliseconds by stage: {stage: (floor in bytes, floor in operations)}."""
    x = layout
    tokens = x.B * (x.Hq * x.Lq + x.Hkv * x.Lkv) * x.D
    means = 4 * x.B * (x.Hq * x.Nq + x.Hkv * x.Nkv) * x.D
    # audited blocks at 1/m, 2/m ... 1, and the proxy rows where they are not the last of them
    m = params.audit_rows
    rows = (m + 1) / 2 * x.block_q + (0 if x.proxy_is_last_audit else 128)
    pairs = x.B * x.Hq * rows * x.Lkv
    pooled_pairs = x.B * x.Hq * x.Nq * (x.Nkv + 1) / 2
    own = m - x.proxy_is_last_audit
    sums = 4 * x.B * x.Hq * x.Nkv * ((own * (own + 1) / 2 / m) * x.block_q + x.planes * 128)
    bytes_, matmul, fp32, exp2 = (
        1e3 / (unit * rate)
        for unit, rate in (
            (1e12, args.bandwidth), (1e12, args.matmul), (1e12, args.fp32), (1e12, args.exp2),
        )
    )  # fmt: skip
    mean_keys = 4 * x.B * x.Hkv * x.Nkv * x.D
    return {
        "pool": ((2 * tokens + means) * bytes_, tokens * fp32),
        "probe": (
            (2 * x.B * x.Hkv * x.Lkv * x.D + sums) * bytes_,
            max(2 * pairs * x.D * matmul, pairs * exp2),
        ),
        "masses": ((sums + mass_bytes) * bytes_, sums / 4 * exp2),
        "audit": ((mass_bytes + mean_keys) * bytes_, 0.0),
        "select": (
            (means + 4 * list_entries) * bytes_,
            2 * 2 * pooled_pairs * x.D * fp32,
        ),
        "stats": (8 * x.B * x.Hq * x.Nq * bytes_, 0.0),
    }


def bench(name, length, args):
    """One row: median time and floors of each stage, and of the whole."""
    heads, L = HEADS[name], LENGTHS[length]
    params = RouteParams.from_config(CrispConfig(policy="hybrid"), D=heads.D)
    check(name, params)
    q, k, _ = columns(heads, L)
    layout = Layout.of(q, k, None, params)
    mean_query, keys = pool_split(q, k, layout)
    numbers = {"scale": params.scale, "audit_rows": params.audit_rows}
    sums = probe(q, k, layout, **numbers)
    measured = masses(sums, layout, audit_rows=params.audit_rows)
    audited = audit(mean_query, keys, measured, layout, scale=params.scale)
    counts, _, full_counts = select(mean_query, keys, audited, layout, params)
    stages = {
        "pool": lambda: pool_split(q, k, layout),
        "probe": lambda: probe(q, k, layout, **numbers),
        "masses": lambda: masses(sums, layout, audit_rows=params.audit_rows),
        "audit": lambda: audit(mean_query, keys, measured, layout, scale=params.scale),
        "select": lambda: select(mean_query, keys, audited, layout, params),
        "stats": lambda: stats(counts, full_counts, measured.c_struct, audited, layout, params),
    }
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    statistics = dict(zip(STAT_NAMES, route(q, k, None, params)[3].unbind(-1), strict=True))
    peak = torch.cuda.max_memory_allocated() - before
    entries = int(statistics["kept_blocks"].sum())
    floor = floors(layout, params, measured.mass.nbytes, entries, args)
    row = {
        "row": "route", "heads": name, "length": L,
        "density": round(entries / float(statistics["visible_blocks"].sum()), 4),
        "coverage": round(float(statistics["coverage"].mean()), 4),
        "peak_mib": round(peak / 2**20, 1),
    }  # fmt: skip
    for stage, call in stages.items():
        row[f"{stage}_ms"] = round(graph_time(call, args.repeats), 4)
        row[f"{stage}_bytes_floor_ms"], row[f"{stage}_ops_floor_ms"] = (
            round(x, 4) for x in floor[stage]
        )
    row["floor_ms"] = round(sum(max(x) for x in floor.values()), 4)
    row["whole_graph_ms"] = round(graph_time(lambda: route(q, k, None, params), args.repeats), 4)
    row["whole_ms"] = round(measure(lambda: route(q, k, None, params), repeats=args.repeats)[0], 4)
    if args.reference:
        call = lambda: reference.route(q, k, None, params)  # noqa: E731
        row["reference_ms"] = round(measure(call, warmup=1, repeats=3)[0], 2)
    return row


# What a sweep tries, beside the constants of the modules: {module: [changes]}.
SWEEP = {
    probe_module: [
        {},
        {"REGISTERS": None},
        {"NUM_WARPS": 4, "REGISTERS": None},
        {"TILE_ROWS": 256, "REGISTERS": None},
        {"TILE_ROWS": 256, "NUM_WARPS": 16, "REGISTERS": None},
        {"NUM_STAGES": 3},
        {"LEAST_SPLIT": 16, "MOST_SPLIT": 64},
        {"LEAST_SPLIT": 4, "MOST_SPLIT": 16},
    ],
    masses_module: [
        {},
        {"MASS_TILE": 32},
        {"MASS_TILE": 8},
        {"MASS_BLOCKS": 256},
        {"MASS_BLOCKS": 64},
        {"MASS_SPLITS": 16},
        {"MASS_TILE": 32, "MASS_WARPS": 8},
    ],
    audit_module: [{}, {"MAP_KEYS": 32}, {"MAP_KEYS": 128}],
    select_module: [
        {},
        {"NUM_STAGES": 1},
        {"NUM_STAGES": 3},
        {"BLOCK_J": 32},
        {"BLOCK_J": 32, "NUM_STAGES": 3},
        {"BLOCK_J": 128, "NUM_WARPS": 8, "NUM_STAGES": 1},
        {"NUM_WARPS": 8},
        {"TILE_ROWS": 128, "NUM_WARPS": 8, "BLOCK_J": 32},
        {"TILE_ROWS": 128, "NUM_WARPS": 8},
        {"TILE_ROWS": 32, "SHORT_TILE_ROWS": 32},
        {"TILE_ROWS": 16, "SHORT_TILE_ROWS": 64},
    ],
}


def sweep(name, length, args):
    """Rows of the median time of the probe and of the selection with other constants."""
    heads = HEADS[name]
    params = RouteParams.from_config(CrispConfig(policy="hybrid"), D=heads.D)
    q, k, _ = columns(heads, LENGTHS[length])
    layout = Layout.of(q, k, None, params)
    mean_query, keys = pool_split(q, k, layout)
    numbers = {"scale": params.scale, "audit_rows": params.audit_rows}
    sums = probe(q, k, layout, **numbers)
    measured = masses(sums, layout, audit_rows=params.audit_rows)
    audited = audit(mean_query, keys, measured, layout, scale=params.scale)
    calls = {
        probe_module: lambda: probe(q, k, layout, **numbers),
        masses_module: lambda: masses(sums, layout, audit_rows=params.audit_rows),
        audit_module: lambda: audit(mean_query, keys, measured, layout, scale=params.scale),
        select_module: lambda: select(mean_query, keys, audited, layout, params),
    }
    for module, variants in SWEEP.items():
        for changes in variants:
            with contextlib.ExitStack() as stack:
                for constant, value in changes.items():
                    stack.enter_context(patch.object(module, constant, value))
                try:
                    milliseconds = graph_time(calls[module], args.repeats)
                except triton.runtime.errors.OutOfResources as error:
                    print(f"  {changes}: {error}")
                    continue
            stage = module.__name__.rsplit(".", 1)[1]
            yield {
                "row": "sweep", "heads": name, "length": length, "stage": stage,
                "changes": changes, "ms": round(milliseconds, 4),
            }  # fmt: skip


def graph_time(call, repeats):
    """Median milliseconds of call() as a CUDA graph of ten of them, for one."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            call()
    return measure(graph.replay, repeats=repeats)[0] / 10


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--heads", nargs="+", default=["llama-3.1-8b"], choices=HEADS)
    parser.add_argument("--lengths", nargs="+", default=["8k", "32k", "128k"], choices=LENGTHS)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--sweep", action="store_true", help="time other constants instead")
    parser.add_argument("--reference", action="store_true", help="time the eager reference too")
    parser.add_argument("--bandwidth", type=float, default=4.3, help="TB/s")
    parser.add_argument("--matmul", type=float, default=790.0, help="TFLOP/s in half precision")
    parser.add_argument("--fp32", type=float, default=60.0, help="TFLOP/s without tensor cores")
    parser.add_argument("--exp2", type=float, default=3.7, help="exponentials, 1e12 per second")
    parser.add_argument("--out", default=None, help="append rows as JSON lines")
    args = parser.parse_args()
    with torch.no_grad():
        for name in args.heads:
            for length in args.lengths:
                if args.sweep:
                    for row in sweep(name, length, args):
                        print(row, flush=True)
                        if args.out:
                            write_rows([{**where(), **row}], args.out)
                    continue
                row = bench(name, length, args)
                print(f"{name} {length}: density {row['density']}, peak {row['peak_mib']} MiB")
                for stage in STAGES:
                    times = [row[f"{stage}_{x}"] for x in ("ms", "bytes_floor_ms", "ops_floor_ms")]
                    print(f"  {stage:7} {times[0]:8.4f} ms   floors {times[1]:.4f} {times[2]:.4f}")
                print(
                    f"  whole   {row['whole_graph_ms']:8.4f} ms as a graph, {row['whole_ms']:.4f} "
                    f"launched, floor {row['floor_ms']:.4f}",
                    flush=True,
                )
                if args.out:
                    write_rows([{**where(), **row}], args.out)


if __name__ == "__main__":
    main()
