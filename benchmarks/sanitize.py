"""A short run of every routing kernel, for compute-sanitizer: small shapes, odd on purpose.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 \\
        python benchmarks/sanitize.py
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool racecheck --error-exitcode 1 \\
        python benchmarks/sanitize.py

Without the caching allocator each tensor is an allocation of its own, so that a read past its end
is seen. A kernel is some 50 times slower under the tool, hence few shapes. Each run must keep about
as many blocks as the eager reference on the CPU does; tests/routing has the exact comparison.
"""

import argparse
import time

import torch
from inputs import here

from crisp_flex import CrispConfig
from crisp_flex.routing import reference
from crisp_flex.routing.ops import route
from crisp_flex.routing.params import STAT_NAMES, RouteParams

# name: (B, Hq, Hkv, Lq, Lkv, D, block size, a key mask)
SHAPES = {
    "aligned D 64": (1, 4, 2, 1280, 1280, 64, (128, 128), False),
    "ragged D 128, B 2": (2, 3, 1, 1500, 1500, 128, (128, 128), False),
    "padded, B 2": (2, 4, 1, 1301, 1301, 64, (128, 128), True),
    "chunk of small blocks": (1, 2, 2, 300, 877, 80, (64, 64), False),
    "one token": (1, 2, 1, 1, 1, 64, (128, 128), False),
    "D 256": (1, 2, 1, 300, 300, 256, (128, 128), False),
}
# Changes to the default config, few lines and diagonals, so that ten blocks suffice to drop some.
_CRISP = {"policy": "crisp", "k_min": 2, "max_uncovered": 1.0}
POLICIES = {
    "hybrid": {"policy": "hybrid"},
    "hybrid, min": {"policy": "hybrid", "coverage_reduce": "min", "coverage": 0.8},
    "bounded": {"policy": "bounded", "max_error": 0.4},
    "crisp": _CRISP,
    "crisp, jsd": {**_CRISP, "router": "jsd"},
    "crisp, vs": {**_CRISP, "router": "vs"},
    "crisp, pe": {**_CRISP, "router": "pe", "gamma": 0.9},
    "streaming": {"policy": "streaming", "streaming_blocks": 1, "max_uncovered": 1.0},
    "dense": {"policy": "dense"},
}
# Share of the kept blocks that may differ in number from the reference's: a line at its threshold.
MOST_DIFFERING = 0.05


def tensors(B, Hq, Hkv, Lq, Lkv, D, masked, device):
    """q, k, v and the key mask; keys 0 and Lkv / 3 are what every head looks at."""
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(B, Hq, Lq, D, generator=g), torch.randn(B, Hkv, Lkv, D, generator=g)
    look = torch.nn.functional.normalize(torch.randn(D, generator=g), dim=0) * (10 * D**0.5) ** 0.5
    q += look
    k[:, :, [0, Lkv // 3]] += look
    v = torch.randn(B, Hkv, Lkv, D, generator=g)
    valid = None
    if masked:  # left padding in the first sequence, right padding in the last
        valid = torch.ones(B, Lkv, dtype=torch.bool)
        valid[0, :201] = False
        valid[-1, Lkv - 130 :] = False
    of_bf16 = (x.bfloat16() for x in (q, k, v))
    return tuple(None if x is None else x.to(device) for x in (*of_bf16, valid))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=POLICIES)
    parser.add_argument("--no-check", action="store_true", help="run the kernels alone")
    parser.add_argument("--device", default=here())
    args = parser.parse_args()
    kept_at = STAT_NAMES.index("kept_blocks")
    for shape in args.shapes:
        *sizes, block_size, masked = SHAPES[shape]
        q, k, v, valid = tensors(*sizes, masked, args.device)
        for policy in args.policies:
            config = CrispConfig(block_size=block_size, **POLICIES[policy])
            params = RouteParams.from_config(config, D=q.shape[3])
            start = time.perf_counter()
            counts, _, full_counts, stats = route(q, k, valid, params, value=v)
            listed = (counts + full_counts).sum((1, 2)).cpu()
            seconds = time.perf_counter() - start
            said = f"{shape}, {policy}: {listed.tolist()} blocks, {seconds:.1f} s"
            if not torch.equal(listed.float(), stats[..., kept_at].sum(1).cpu()):
                raise SystemExit(f"{said}: the lists and the statistics disagree")
            if not args.no_check:
                q_, k_, v_, valid_ = (x if x is None else x.cpu() for x in (q, k, v, valid))
                want = reference.route(q_, k_, valid_, params, value=v_)[3][..., kept_at].sum(1)
                if ((listed - want).abs() > MOST_DIFFERING * want + 1).any():
                    raise SystemExit(f"{said}: the reference keeps {want.tolist()}")
            print(said, flush=True)


if __name__ == "__main__":
    main()
