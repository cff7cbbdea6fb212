"""Compiles the routing kernels for GPUs that are not here, as their launchers launch them.

The interpreter takes what the compiler refuses, so this is where a machine without a GPU finds out:

    PYTHONPATH=. python tests/routing/kernels/offline.py --D 128 --arch 90 --kernel select

prints registers, spills, shared memory and the programs that fit a multiprocessor, per kernel. The
launchers run on meta tensors; their launches are recorded instead of run. Needs ptxas (Triton's own
or CUDA's), triton 3.6.
"""

# ruff: noqa: T201 (a command)

from __future__ import annotations

import argparse
import contextlib
import math
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime import jit

from crisp_flex.config import CrispConfig
from crisp_flex.routing.kernels import dispatch as kernels
from crisp_flex.routing.params import RouteParams

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# KiB of shared memory a program may have, and a multiprocessor has, by compute capability.
SHARED_KIB = {80: (163, 164), 89: (99, 100), 90: (227, 228), 100: (227, 228), 120: (99, 100)}
REGISTERS = 65536
MOST_WARPS = {80: 64, 89: 48, 90: 64, 100: 64, 120: 48}


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel: the function and what its launcher passed."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        return self.kernel.__name__.strip("_").removesuffix("_kernel")


@dataclass(frozen=True)
class Built:
    """What ptxas says of a kernel; bytes, and registers per thread."""

    name: str
    arch: int
    warps: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    # instructions on fp64: a Python float below 2**-126 makes all that it meets fp64
    fp64: int
    seconds: float

    @property
    def fits(self) -> bool:
        """Whether the GPU can start one program at all."""
        return self.shared_bytes <= SHARED_KIB[self.arch][0] * 1024

    @property
    def programs(self) -> int:
        """Programs that share a multiprocessor."""
        if not self.fits:
            return 0
        by_registers = REGISTERS // (math.ceil(self.registers / 8) * 8 * 32 * self.warps)
        # each program reserves 1 KiB more than it asks for
        by_shared = SHARED_KIB[self.arch][1] * 1024 // (self.shared_bytes + 1024)
        return min(by_registers, by_shared, MOST_WARPS[self.arch] // self.warps, 32)


def record(call: Callable[[], Any]) -> list[Launch]:
    """The launches that call() would make."""
    launches: list[Launch] = []

    def run(kernel: Any, *args: Any, grid: tuple[int, ...], warmup: bool, **kwargs: Any) -> None:
        launches.append(Launch(kernel, grid, args, kwargs))

    with mock.patch.object(jit.JITFunction, "run", run):
        call()
    return launches


def specialize(launch: Launch, arch: int) -> tuple[ASTSource, Any]:
    """The source that Triton would compile for this launch, and its options."""
    backend = make_backend(GPUTarget("cuda", arch, 32))
    bind = jit.create_function_from_signature(
        launch.kernel.signature, launch.kernel.params, backend
    )
    bound, specialization, options = bind(*launch.args, debug=False, **launch.kwargs)
    options, signature, constexprs, attrs = launch.kernel._pack_args(
        backend, {**launch.kwargs, "debug": False}, bound, specialization, options
    )
    return ASTSource(launch.kernel, signature, constexprs, attrs), options


def build(launch: Launch, arch: int) -> Built:
    """Compile down to SASS; raises what Triton or ptxas raises."""
    began = time.perf_counter()
    source, options = specialize(launch, arch)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options.__dict__)
    report = _ptxas_report(compiled.asm["ptx"], arch)
    return Built(
        name=launch.name,
        arch=arch,
        warps=options.num_warps,
        registers=int(re.search(r"Used (\d+) registers", report).group(1)),
        spill_bytes=int(re.search(r"(\d+) bytes spill stores", report).group(1)),
        shared_bytes=compiled.metadata.shared,
        fp64=compiled.asm["ptx"].count(".f64"),
        seconds=time.perf_counter() - began,
    )


def ptxas(arch: int) -> str | None:
    """Path of the ptxas that Triton takes for arch, None if there is none."""
    from triton.backends.nvidia.compiler import get_ptxas

    with contextlib.suppress(RuntimeError):
        path = get_ptxas(arch).path
        return path if Path(path).exists() else None
    return None


def _ptxas_report(ptx: str, arch: int) -> str:
    target = re.search(r"\.target (sm_\w+)", ptx).group(1)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [ptxas(arch), "-v", f"--gpu-name={target}", file.name, "-o", "/dev/null"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stderr


def routed(
    policy: str = "hybrid",
    *,
    L: int = 131072,
    D: int = 128,
    Hq: int = 32,
    Hkv: int = 8,
    B: int = 1,
    padded: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    block: tuple[int, int] = (128, 128),
    moved: bool = False,
    **changes: Any,
) -> list[Launch]:
    """The launches of one call of the route op; moved with the position of query 0 in a tensor."""
    query = torch.empty(B, Hq, L, D, dtype=dtype, device="meta")
    key = torch.empty(B, Hkv, L, D, dtype=dtype, device="meta")
    key_valid = torch.empty(B, L, dtype=torch.bool, device="meta") if padded else None
    config = CrispConfig(policy=policy, block_size=block, **changes)
    params = RouteParams.from_config(config, D=D)
    if not kernels.supports(query, key, params):
        raise ValueError(f"the kernels do not take {params} at D {D}, {dtype}")
    q_offset = torch.empty(1, dtype=torch.int64, device="meta") if moved else None
    value = torch.empty_like(key) if params.reads_values else None
    return record(lambda: kernels.route(query, key, key_valid, params, q_offset, value))


def distinct(launches: list[Launch], arch: int) -> Iterator[Launch]:
    """Launches that compile to different code."""
    seen = set()
    for launch in launches:
        source, options = specialize(launch, arch)
        key = (source.hash(), str(options))
        if key not in seen:
            seen.add(key)
            yield launch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", nargs="+", default=["hybrid"])
    parser.add_argument("--D", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--arch", type=int, nargs="+", default=[90], choices=list(SHARED_KIB))
    parser.add_argument("--L", type=int, default=131072)
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 8], metavar=("Hq", "Hkv"))
    parser.add_argument("--block", type=int, nargs=2, default=[128, 128], metavar=("Q", "KV"))
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument(
        "--masks", nargs="+", choices=["plain", "padded", "moved"], default=["plain"]
    )
    parser.add_argument("--kernel", default="", help="only kernels whose name contains this")
    options = parser.parse_args()
    print(f"{'kernel':18} {'case':34} arch warps regs spill fp64 shared_KiB programs/SM seconds")
    for arch in options.arch:
        for policy in options.policy:
            for D in options.D:
                for mask in options.masks:
                    launches = routed(
                        policy, L=options.L, D=D, Hq=options.heads[0], Hkv=options.heads[1],
                        padded=mask == "padded", moved=mask == "moved", dtype=DTYPES[options.dtype],
                        block=tuple(options.block),
                    )  # fmt: skip
                    case = f"{policy} D{D} L{options.L} {mask} {options.dtype}"
                    chosen = [x for x in launches if options.kernel in x.name]
                    for launch in distinct(chosen, arch):
                        print(f"{launch.name:18} {case:34} ", end="", flush=True)
                        try:
                            x = build(launch, arch)
                        except Exception as error:
                            print(f"{arch:4} FAILED {str(error).strip()[-1500:]}", flush=True)
                            continue
                        print(
                            f"{arch:4} {x.warps:5} {x.registers:4} {x.spill_bytes:5} "
                            f"{x.fp64:4} "
                            f"{x.shared_bytes / 1024:10.1f} {x.programs:11} {x.seconds:7.1f}",
                            flush=True,
                        )


if __name__ == "__main__":
    main()
