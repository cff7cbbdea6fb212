"""One attention layer: selection and sparse kernel against every dense path, on the same inputs.

    python benchmarks/bench_attention.py [--heads NAME ...] [--lengths 8k 32k ...] [--out FILE]

A row is printed only after the timed sparse result matched an fp32 reference on sampled query
blocks of that very input. Columns: density (kept / causal blocks), coverage (exact attention mass
kept on the audited rows), route and sparse in ms, the dense baselines in ms, ratio = fastest dense
SDPA / (route + sparse). Inputs: `structured` q, k with a sink, a few vertical columns, and a
background (heads differ).
"""

import argparse

import torch
import torch.nn.functional as F
from cases import HEADS, LENGTHS
from timing import measure, where, write_rows
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from crisp_flex import CrispConfig, flex_hop
from crisp_flex.attention import _compiled_flex, route
from crisp_flex.routing.ops import route as route_op
from crisp_flex.routing.params import STAT_NAMES, RouteParams


def structured(heads, L, *, seed=0, dtype=torch.bfloat16):
    """q, k, v whose heads look at a sink, at 4 to 40 columns each, and a little at everything."""
    g = torch.Generator("cuda").manual_seed(seed)
    Hq, Hkv, D = heads.Hq, heads.Hkv, heads.D
    q = torch.randn(1, Hq, L, D, device="cuda", generator=g)
    k = torch.randn(1, Hkv, L, D, device="cuda", generator=g)
    v = torch.randn(1, Hkv, L, D, device="cuda", generator=g)
    u = F.normalize(torch.randn(Hkv, D, device="cuda", generator=g), dim=-1)
    gain = (14 * D**0.5) ** 0.5
    q += gain * u.repeat_interleave(Hq // Hkv, 0)[None, :, None]
    for head in range(Hkv):
        columns = torch.randint(0, L, (4 + 5 * head,), device="cuda", generator=g)
        columns[0] = 0
        k[:, head, columns] += gain * u[head]
    return q.to(dtype), k.to(dtype), v.to(dtype)


def sampled_error(out, q, k, v, block_mask, rows):
    """|| out - want || / || want || over the given query blocks, want in fp32 from the lists."""
    L, D, G = q.shape[2], q.shape[3], q.shape[1] // k.shape[1]
    difference = norm = 0.0
    position = torch.arange(L, device="cuda")
    for row in rows:
        queries = position[row * 128 : (row + 1) * 128]
        for head in range(q.shape[1]):
            counts = (
                block_mask.kv_num_blocks[0, head, row],
                block_mask.full_kv_num_blocks[0, head, row],
            )
            blocks = torch.cat([
                block_mask.kv_indices[0, head, row, : counts[0]],
                block_mask.full_kv_indices[0, head, row, : counts[1]],
            ])  # fmt: skip
            keys = (blocks[:, None] * 128 + torch.arange(128, device="cuda")).flatten()
            keys = keys[keys < L].long()
            logits = q[0, head, queries].float() @ k[0, head // G, keys].float().T * D**-0.5
            logits.masked_fill_(keys > queries[:, None], float("-inf"))
            want = logits.softmax(-1) @ v[0, head // G, keys].float()
            difference += (out[0, head, queries].float() - want).square().sum().item()
            norm += want.square().sum().item()
    return (difference / norm) ** 0.5


def dense_times(q, k, v, repeats):
    """Milliseconds of each dense path that runs here: cuDNN and flash SDPA, flex, FA4."""

    def sdpa(backend):
        def call():
            with sdpa_kernel(backend):
                F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        return call

    def flex(kernel):
        mask = create_block_mask(
            flex_hop.causal_mod, None, None, q.shape[2], k.shape[2], device="cuda", _compile=True
        )
        options = {"BACKEND": kernel}
        if kernel == "TRITON":
            options |= flex_hop._tuned_triton(q.device, q.dtype, q.shape[3])
        compiled = torch.compile(flex_attention)
        return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=True, kernel_options=options)

    paths = {
        "sdpa_cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
        "sdpa_flash": sdpa(SDPBackend.FLASH_ATTENTION),
        "flex_triton": flex("TRITON"),
    }
    if flex_hop.flash_available() and q.shape[3] <= flex_hop.FLASH_MAX_HEAD_DIM:
        paths["flex_fa4"] = flex("FLASH")
    times = {}
    for name, call in paths.items():
        try:
            times[name] = round(measure(call, repeats=repeats)[0], 3)
        except RuntimeError as error:  # a head dim that a path does not take
            times[name] = None
            print(f"  {name} does not run: {str(error).splitlines()[0][:90]}")
    return times


def bench(name, length, policy, backend, repeats):
    heads, L = HEADS[name], LENGTHS[length]
    q, k, v = structured(heads, L)
    config = CrispConfig(policy=policy, backend=backend)
    params = RouteParams.from_config(config, D=heads.D)
    block_mask = route(q, k, config)
    stats = dict(zip(STAT_NAMES, route_op(q, k, None, params)[3][0].T.tolist(), strict=True))
    density = sum(stats["kept_blocks"]) / sum(stats["visible_blocks"])
    kernel = flex_hop.choose_kernel(
        q.device, q.dtype, D=heads.D, Dv=heads.D, block_size=(128, 128), backend=backend,
        captures=False,
    )  # fmt: skip
    options = flex_hop.kernel_options(
        kernel, device=q.device, dtype=q.dtype, D=heads.D, divisible=True, user={}
    )
    del options["OUTPUT_LOGSUMEXP"], options["OUTPUT_MAX"]

    def sparse():
        return _compiled_flex()(q, k, v, block_mask, None, options)

    with torch.no_grad():
        N = L // 128
        error = sampled_error(sparse(), q, k, v, block_mask, [0, N // 3, N // 2, N - 1])
        if not error < 3e-3:
            raise SystemExit(f"{name} {length} {kernel}: relative error {error:.2e}, not timed")
        sparse_ms = measure(sparse, repeats=repeats)[0]
        route_ms = measure(lambda: route_op(q, k, None, params), warmup=1, repeats=repeats)[0]
        dense = dense_times(q, k, v, repeats)
    best = min(t for path, t in dense.items() if path.startswith("sdpa") and t)
    flop = 4 * heads.D * 128 * 128 * sum(stats["kept_blocks"])
    return {
        "row": "attention", "heads": name, "length": L, "policy": policy, "kernel": kernel,
        "density": round(density, 4),
        "coverage": round(sum(stats["coverage"]) / len(stats["coverage"]), 4),
        "error": f"{error:.1e}", "route_ms": round(route_ms, 3), "sparse_ms": round(sparse_ms, 3),
        "sparse_tflops": round(flop / sparse_ms / 1e9, 1),
        **{f"{path}_ms": t for path, t in dense.items()},
        "ratio_total": round(best / (route_ms + sparse_ms), 2),
        "ratio_kernel": round(best / sparse_ms, 2),
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--heads", nargs="+", default=["llama-3.1-8b"], choices=HEADS)
    parser.add_argument("--lengths", nargs="+", default=["8k", "32k"], choices=LENGTHS)
    parser.add_argument("--policy", default="hybrid")
    parser.add_argument("--backends", nargs="+", default=["auto"])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    for name in args.heads:
        for length in args.lengths:
            for backend in args.backends:
                row = bench(name, length, args.policy, backend, args.repeats)
                print(row, flush=True)
                if args.out:
                    write_rows([{**where(), **row}], args.out)


if __name__ == "__main__":
    main()
