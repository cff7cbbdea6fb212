"""Compiles FlexAttention's Triton kernel with gpu_table's options for GPUs that are not here.

    PYTHONPATH=.:tests/passes python tests/cuda_template/offline.py --arch 80 89 --D 64 128 256
    PYTHONPATH=.:tests/passes python tests/cuda_template/offline.py --arch 89 --D 128 \\
        --tile BLOCK_M=128 BLOCK_N=64 num_warps=8 num_stages=2

writes one JSON line a kernel: its options, bytes of shared memory, and registers and spilled bytes
a thread (of ptxas). It patches torch for the whole process (see lower.py). Needs triton 3.6, ptxas.
"""

import argparse
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import namedtuple
from pathlib import Path

import lower
import torch
import triton
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.runtime import triton_heuristics
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from crisp_flex import gpu_table

# Bytes of shared memory that a program may ask for, by compute capability (CUDA C programming
# guide, "Technical specifications per compute capability").
SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}
HEADS = {64: (14, 2), 128: (32, 8), 256: (16, 4)}


def pretend(arch):
    """From now on the machine has one GPU of that architecture."""
    facts = {
        **lower.H200,
        "name": f"sm_{arch}",
        "major": arch // 10,
        "minor": arch % 10,
        "shared_memory_per_block_optin": SHARED_BYTES[arch],
    }
    properties = namedtuple("Properties", facts)(**facts)
    torch.cuda.get_device_properties = lambda *args: properties
    CudaInterface.get_device_properties = staticmethod(lambda *args: properties)
    target = GPUTarget("cuda", arch, 32)
    triton.runtime.driver.set_active(type("Driver", (), {"get_current_target": lambda _: target})())
    return target


def build(arch, D, *, L=1024, dtype=torch.bfloat16, block_size=(128, 128), tile=None):
    """{"shared_bytes", "registers", "spilled_bytes", ...} of the kernel for one head dim."""
    target = pretend(arch)
    Hq, Hkv = HEADS.get(D, (8, 2))
    options = tile or gpu_table.triton_options(lower.CUDA, dtype, D, block_size)
    case = {
        "name": f"sm_{arch} D {D}", "B": 1, "Hq": Hq, "Hkv": Hkv, "L_compiled": L, "D": D,
        "padding": None, "transposed": True, "dynamic": False, "block_size": block_size,
        "kernel_options": tile or {}, "config": {"policy": "hybrid"},
    }  # fmt: skip
    torch.set_default_dtype(dtype)
    try:
        program = lower.lower(case)
    finally:
        torch.set_default_dtype(torch.float32)
    kernel, meta, launch = _kernel(program)
    source = ASTSource(kernel, meta["signature"], meta.get("constants", {}), meta["configs"][0])
    built = triton.compile(source, target=target, options=launch)
    registers, spilled = _resources(built.asm["ptx"], arch)
    return {
        "arch": arch, "D": D, "dtype": str(dtype).removeprefix("torch."), "options": options,
        "launch": launch, "shared_bytes": built.metadata.shared, "limit_bytes": SHARED_BYTES[arch],
        "registers": registers, "spilled_bytes": spilled,
    }  # fmt: skip


def _kernel(program):
    """The one flex kernel of an Inductor program: function, triton_meta, warps and stages."""
    (text,) = re.findall(r"async_compile\.triton\('\w*flex\w*', '''\n(.*?)'''", program, re.DOTALL)
    found = {}

    def template(num_stages, num_warps, triton_meta, **_):
        found["meta"] = triton_meta
        found["launch"] = {"num_stages": num_stages, "num_warps": num_warps}
        return lambda function: found.setdefault("kernel", function)

    path = Path(tempfile.mkdtemp()) / "kernel.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("kernel", path)
    original, triton_heuristics.template = triton_heuristics.template, template
    try:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    finally:
        triton_heuristics.template = original
    return found["kernel"], found["meta"], found["launch"]


def _resources(ptx, arch):
    """(registers, spilled bytes) a thread; (None, None) where ptxas does not know the arch."""
    name = "ptxas-blackwell" if arch >= 100 else "ptxas"
    ours = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        suffix = "a" if arch in (90, 100, 120) else ""
        run = subprocess.run(
            [ours if ours.exists() else shutil.which("ptxas"), "-v", f"-arch=sm_{arch}{suffix}",
             file.name, "-o", "/dev/null"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    used = re.search(r"Used (\d+) registers", run.stderr)
    spilled = re.search(r"(\d+) bytes spill stores", run.stderr)
    return (int(used[1]), int(spilled[1])) if used and spilled else (None, None)


def start():
    """Patch torch and Inductor once."""
    lower.pretend_h200()
    lower.stop_before_loading()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--arch", nargs="+", type=int, default=[80, 89, 90, 120])
    parser.add_argument("--D", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--tile", nargs="+", default=[], metavar="OPTION=NUMBER")
    args = parser.parse_args()
    tile = {name: int(number) for name, _, number in (t.partition("=") for t in args.tile)}
    start()
    failed = []
    for arch in args.arch:
        for D in args.D:
            row = build(arch, D, L=args.length, tile=tile)
            sys.stdout.write(json.dumps(row) + "\n")
            if row["shared_bytes"] > row["limit_bytes"]:
                failed.append((arch, D))
    if failed:
        raise SystemExit(f"more shared memory than a program may have: {failed}")


if __name__ == "__main__":
    main()
