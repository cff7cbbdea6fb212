"""Which options of FlexAttention's kernels are fastest on this GPU, on routed blocks.

    python benchmarks/tune_flex.py [--heads NAME ...] [--length 64k] [--share 0.1] [--out FILE]
    python benchmarks/tune_flex.py --heads llama-3.1-8b --tile TRITON 128 64 8 3 1

For each head dim: routes `structured` inputs once a block size, then compiles, checks and times one
variant after the other, the likely ones first, until --seconds are spent. A variant is timed only
after its result matched fp32 attention over the same blocks, on four query blocks of three heads;
one that does not compile or does not match is a row with its error. --tile takes TRITON and
BLOCK_M, BLOCK_N, num_warps, num_stages, USE_TMA, or FLASH and the two block sizes. The last lines
set the fastest beside what crisp_flex/gpu_table.py takes now. On the CPU one call is checked.
"""

import argparse
import time

import torch
from cases import HEADS, spelled, tokens
from inputs import here, structured
from timing import measure, where, write_rows
from torch.nn.attention.flex_attention import flex_attention

import crisp_flex
from crisp_flex import CrispConfig, flex_hop, gpu_table

# || got - want || / || want || of bf16 against fp32
MOST_ERROR = 3e-3
NAMES = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages", "USE_TMA")
# By head dim: the table's row and Inductor's own, then tiles that fit 227 KB and spill little or
# nothing when compiled offline, then bolder ones.
TRITON = {
    64: (
        (128, 128, 4, 3, 0), (128, 128, 8, 3, 0), (128, 128, 8, 2, 1), (128, 64, 4, 3, 0),
        (128, 128, 4, 2, 1), (128, 64, 4, 4, 1), (128, 128, 8, 3, 1), (64, 128, 4, 3, 0),
    ),
    128: (
        (128, 128, 8, 2, 1), (128, 64, 8, 3, 0), (128, 128, 8, 2, 0), (128, 64, 4, 3, 0),
        (128, 64, 8, 4, 1), (128, 64, 4, 3, 1), (64, 128, 4, 2, 1), (128, 128, 8, 3, 1),
    ),
    256: (
        (64, 32, 4, 3, 0), (128, 64, 8, 2, 0), (128, 64, 8, 2, 1), (128, 32, 8, 3, 1),
        (64, 64, 4, 2, 1), (128, 32, 8, 4, 0), (64, 64, 4, 2, 0), (128, 128, 8, 1, 0),
    ),
}  # fmt: skip
FLASH = {64: ((128, 128), (128, 64)), 128: ((128, 128), (128, 64)), 256: ((128, 64),)}


def variants(D, kernels, tile):
    """(kernel, block size, options) to try, likely winners first."""
    known = min((d for d in TRITON if d >= D), default=256)
    listed = {"FLASH": FLASH[known], "TRITON": TRITON[known]}
    if tile:
        listed = {tile[0]: [tuple(map(int, tile[1:]))]}
    for kernel in kernels:
        for numbers in listed.get(kernel, ()):
            if kernel == "FLASH":
                yield kernel, numbers, {}
            else:
                options = dict(zip(NAMES, numbers, strict=True))
                yield kernel, (128, 128), {**options, "USE_TMA": bool(options["USE_TMA"])}


class Routed:
    """One layer's inputs and the block masks of it, by block size."""

    def __init__(self, name, L, share):
        device = here()
        self.name, self.L, self.heads = name, L, HEADS[name]
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.q, self.k, self.v = structured(self.heads, L, share=share, dtype=dtype, device=device)
        self._masks = {}

    def block_mask(self, block_size):
        if block_size not in self._masks:
            config = CrispConfig(block_size=block_size)
            mask = crisp_flex.route(self.q, self.k, config, value=self.v)
            kept = int((mask.kv_num_blocks + mask.full_kv_num_blocks).sum())
            self._masks[block_size] = mask, kept
        return self._masks[block_size]

    def density(self, block_size):
        block_q, block_kv = block_size
        ends = [min((row + 1) * block_q, self.L) for row in range(-(-self.L // block_q))]
        causal = sum(-(-end // block_kv) for end in ends)
        return self.block_mask(block_size)[1] / (causal * self.heads.Hq)

    def error(self, out, block_size):
        """|| out - want || / || want || on four query blocks of three heads, want in fp32."""
        mask, _ = self.block_mask(block_size)
        (block_q, block_kv), D = block_size, self.heads.D
        G, N = self.heads.Hq // self.heads.Hkv, -(-self.L // block_q)
        difference = norm = 0.0
        for head in {0, self.heads.Hq // 2, self.heads.Hq - 1}:
            for row in {0, N // 3, N // 2, N - 1}:
                blocks = torch.cat([
                    indices[0, head, row, : int(counts[0, head, row])]
                    for counts, indices in (
                        (mask.kv_num_blocks, mask.kv_indices),
                        (mask.full_kv_num_blocks, mask.full_kv_indices),
                    )
                ]).long()  # fmt: skip
                tokens_of = torch.arange(block_kv, device=out.device)
                keys = (blocks[:, None] * block_kv + tokens_of).flatten()
                keys = keys[keys < self.L]
                rows = torch.arange(row * block_q, min((row + 1) * block_q, self.L))
                rows = rows.to(out.device)
                logits = self.q[0, head, rows].float() @ self.k[0, head // G, keys].float().T
                logits = (logits * D**-0.5).masked_fill(keys > rows[:, None], float("-inf"))
                want = logits.softmax(-1) @ self.v[0, head // G, keys].float()
                difference += (out[0, head, rows].float() - want).square().sum().item()
                norm += want.square().sum().item()
        return (difference / norm) ** 0.5


def time_variant(routed, kernel, block_size, tile, repeats):
    """A row: milliseconds and TFLOP/s, or why there are none."""
    heads = routed.heads
    row = {
        "row": "tune_flex", "heads": routed.name, "shape": f"{heads.Hq}/{heads.Hkv} D {heads.D}",
        "length": routed.L, "kernel": kernel, "block_size": list(block_size), "tile": tile,
    }  # fmt: skip
    try:
        mask, kept = routed.block_mask(block_size)
        row["density"] = round(routed.density(block_size), 4)
        options = flex_hop.kernel_options(
            kernel, device=routed.q.device, dtype=routed.q.dtype, D=heads.D,
            divisible=routed.L % 128 == 0, user=tile, block_size=block_size,
        )  # fmt: skip
        options = {k: x for k, x in options.items() if not k.startswith("OUTPUT_")}
        torch._dynamo.reset()  # a cache entry a variant would meet Dynamo's recompile limit
        compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)

        def attend():
            return compiled(
                routed.q, routed.k, routed.v, block_mask=mask, enable_gqa=True,
                kernel_options=options,
            )  # fmt: skip

        begin = time.perf_counter()
        with torch.no_grad():
            error = routed.error(attend(), block_size)
            row["first_call_s"] = round(time.perf_counter() - begin, 2)
            row["error"] = float(f"{error:.2e}")
            if not error < MOST_ERROR:
                return {**row, "failed": f"relative error above {MOST_ERROR}"}
            ms, low, high = measure(attend, warmup=2, repeats=repeats)
    except Exception as failure:  # whatever a compiler or a driver raises is an answer
        if here() == "cuda":
            torch.cuda.synchronize()
        lines = [line for line in str(failure).splitlines() if line.strip()]
        why = next((x for x in lines if "esource" in x or "rror" in x), lines[0] if lines else "")
        return {**row, "failed": f"{type(failure).__name__}: {why.strip()[:160]}"}
    flop = 4 * heads.D * block_size[0] * block_size[1] * kept
    row |= {"ms": round(ms, 4), "quartiles_ms": [round(low, 4), round(high, 4)]}
    return {**row, "tflops": round(flop / ms / 1e9, 1)}


def say(row):
    what = " ".join(f"{name}={int(x)}" for name, x in row["tile"].items()) or row["block_size"]
    got = row.get("failed") or f"{row['ms']:8.3f} ms {row['tflops']:7.1f} TFLOP/s"
    print(f"{row['shape']:14} {row['kernel']:7} {what}: {got}", flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--heads", nargs="+", choices=HEADS,
        default=["llama-3.1-8b", "gemma-3-4b", "qwen2-0.5b"],
    )  # fmt: skip
    parser.add_argument("--length", type=tokens, default=65536)
    parser.add_argument("--share", type=float, default=0.1, help="of blocks kept, about")
    parser.add_argument("--kernels", nargs="+", default=["FLASH", "TRITON"])
    parser.add_argument("--tile", nargs="+", default=None, help="one variant only")
    parser.add_argument("--seconds", type=float, default=45, help="a head dim, compiling included")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", default=None, help="JSON lines are appended here")
    args = parser.parse_args()
    kernels = [k for k in args.kernels if k != "FLASH" or flex_hop.flash_available()]
    rows = []
    for name in args.heads:
        begin = time.perf_counter()
        routed = Routed(name, args.length, args.share)
        D = routed.heads.D
        tries = [("CPU", (128, 128), {})]
        if here() == "cuda":
            tries = list(variants(D, kernels, args.tile))
        for number, (kernel, block_size, tile) in enumerate(tries):
            if number and time.perf_counter() - begin > args.seconds:
                print(f"{name}: {len(tries) - number} variants left out, {args.seconds} s are over")
                break
            row = time_variant(routed, kernel, block_size, tile, args.repeats)
            rows.append(row)
            say(row)
            if args.out:
                write_rows([{**where(), **row}], args.out)
        print(f"{name}: {time.perf_counter() - begin:.0f} s", flush=True)
        if here() == "cuda":
            now = gpu_table.triton_options(routed.q.device, routed.q.dtype, D, (128, 128))
            timed = [row for row in rows if row["heads"] == name and "ms" in row]
            for kernel in sorted({row["kernel"] for row in timed}):
                best = max((r for r in timed if r["kernel"] == kernel), key=lambda r: r["tflops"])
                print(f"  fastest {kernel} at {spelled(args.length)}: ", end="")
                say(best)
            print(f"  gpu_table takes now: {now or 'what Inductor chooses'}", flush=True)
        del routed
    if all("failed" in row for row in rows):
        raise SystemExit("no variant ran")


if __name__ == "__main__":
    main()
