"""Second half of the CUDA-template lane: run the programs of lower.py in Triton's interpreter.

    TRITON_INTERPRET=1 python run.py CASES_JSON RUNS_JSON OUT_DIR

A program is run as it is, with its call of crisp_flex::route (the eager reference, on the CPU), its
checks of strides and its addressing of both lists in one buffer. Only the launches go to the
interpreter, and what the program allocates is poisoned. Inputs, lists as routed and output of a run
are saved to OUT_DIR/<case>; <change>.pt; judging them is the test's part.
"""

import contextlib
import functools
import importlib.util
import json
import math
import sys
from pathlib import Path

import numpy
import torch
import triton.runtime.interpreter
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.runtime import triton_helpers, triton_heuristics

from crisp_flex.routing.ops import observe

# Tokens of NaN before and after each input: more than the largest block.
GUARD_TOKENS = 512
POISON = {torch.bool: True, torch.int32: 1 << 30, torch.float32: float("nan")}


class InterpretedKernel:
    """A generated kernel that runs on CPU tensors.

    Attributes:
        before_attention: Called before the attention kernel is launched.
    """

    before_attention = staticmethod(lambda: None)

    def __init__(self, jitted, extra_arguments):
        self.jitted = jitted
        self.extra_arguments = extra_arguments

    def run(self, *args, stream):
        """What Inductor's launcher is called with: the arguments, then the grid of a template."""
        if "arg_KV_NUM_BLKS" in self.jitted.arg_names:
            self.before_attention()
        arguments, grid = self.extra_arguments(args)
        self.jitted[grid](*arguments)


def template_kernel(*, inductor_meta, **_):
    """Stands in for Inductor's decorator of template kernels; the caller gives the grid."""
    if inductor_meta["grid_type"] != "FixedGrid":
        raise NotImplementedError(inductor_meta["grid_type"])
    return lambda jitted: InterpretedKernel(jitted, lambda args: (args[:-3], args[-3:]))


def pointwise_kernel(*, inductor_meta, **_):
    """Stands in for Inductor's decorator of elementwise kernels; the last argument is the size."""
    if inductor_meta["grid_type"] != "Grid1D":
        raise NotImplementedError(inductor_meta["grid_type"])
    XBLOCK = 1024
    return lambda jitted: InterpretedKernel(
        jitted, lambda args: ((*args, XBLOCK), (triton.cdiv(args[-1], XBLOCK),))
    )


def interpret_launches(out):
    """Point what generated programs import at the interpreter; kernels are written to out."""
    triton_heuristics.template = template_kernel
    triton_heuristics.pointwise = pointwise_kernel
    triton_helpers.set_driver_to_gpu = lambda: None
    torch._C._cuda_getCurrentRawStream = lambda device: 0
    torch.cuda._DeviceGuard = lambda device: contextlib.nullcontext()
    torch.cuda.set_device = lambda device: None

    def load_kernel(self, name, source, **_):
        # triton reads a kernel's source from its file
        path = out / f"kernel_{len(list(out.glob('kernel_*')))}_{name}.py"
        path.write_text(source)
        return getattr(load(path), name)

    AsyncCompile.triton = load_kernel
    AsyncCompile.wait = lambda self, scope: None


def accept_arrays_as_indices():
    """Let the interpreter loop to a bound that a kernel computed, with numpy 2.4 and later.

    The bound is an array of one element, which numpy turns into an int only up to 2.3.
    """
    interpreter = triton.runtime.interpreter
    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(numpy.ravel(self.handle.data)[0]))

    interpreter._patch_lang_tensor = patched


def load(path):
    """The module in a file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def poisoned(shape, strides, dtype):
    """What stands in for an allocation of CUDA memory."""
    return torch.empty_strided(shape, strides, dtype=dtype).fill_(POISON[dtype])


def guarded(B, H, L, D, *, transposed):
    """Random [B, H, L, D] between guard pages of NaN, stored as [B, L, H, D] if transposed."""
    shape = (B, L, H, D) if transposed else (B, H, L, D)
    guard, size = GUARD_TOKENS * D, B * H * L * D
    memory = torch.full((guard + size + guard,), float("nan"))
    x = memory[guard : guard + size].view(shape).normal_()
    return x.transpose(1, 2) if transposed else x


def make_inputs(case):
    """The inputs of a case by name; each query head looks for 32 keys of its own."""
    B, Hq, Hkv, L, D = (case[n] for n in ("B", "Hq", "Hkv", "L", "D"))
    transposed = case["transposed"]
    q, k, v = (guarded(B, H, L, D, transposed=transposed) for H in (Hq, Hkv, Hkv))
    for head in range(Hq):
        q[:, head, :, head] += 8.0
        first = head * L // (Hq + 1)
        k[:, head * Hkv // Hq, first : first + 32, head] += 0.75 * math.sqrt(D)
    inputs = {"q": q, "k": k, "v": v, "L": L}
    if case["padding"]:
        starts = torch.tensor(case["padding"])[:, None]
        inputs["attention_mask"] = (torch.arange(L) >= starts).long()
    return inputs


def drop_block(counts, buffer, full_counts):
    """The last query block of head 0 loses the last of its full blocks."""
    full_counts[0, 0, -1] -= 1


def merge_lists(counts, buffer, full_counts, *, descending):
    """All blocks of a row in its partial list, in one order; needs Nkv partial slots."""
    P = buffer.shape[3] // 2
    for row, partial, full in zip(
        buffer.flatten(0, 2), counts.flatten(), full_counts.flatten(), strict=True
    ):
        blocks = torch.cat([row[:partial], row[P : P + full]]).sort(descending=descending).values
        row[: len(blocks)] = blocks
    counts += full_counts
    full_counts.zero_()


CHANGES = {
    "drop a block": drop_block,
    "one ascending list": functools.partial(merge_lists, descending=False),
    "one descending list": functools.partial(merge_lists, descending=True),
}


def without_bounds_checks(program):
    """A copy of a program for ragged lengths whose kernel takes the blocks to come out even."""
    text = program.read_text()
    ragged = "IS_DIVISIBLE : tl.constexpr = False"
    if ragged not in text:
        raise RuntimeError(f"{program} has no {ragged}")
    unchecked = program.with_stem(f"{program.stem}; unchecked")
    unchecked.write_text(text.replace(ragged, ragged.replace("False", "True")))
    return unchecked


def run(case, change, out):
    """Run one program on random inputs, its lists or its checks changed as a control asks."""
    program = out / f"{case['name']}.py"
    if change == "skip bounds checks":
        program = without_bounds_checks(program)
    module = load(program)
    module.empty_strided_cuda = poisoned
    inputs = make_inputs(case)
    lists, routed = [], []

    def keep_lists(index, counts, buffer, full_counts, stats):
        lists.extend((counts, buffer, full_counts))
        routed.extend(x.clone() for x in lists)

    def change_lists():
        if change in CHANGES:
            CHANGES[change](*lists)

    InterpretedKernel.before_attention = staticmethod(change_lists)
    with observe(keep_lists):
        (output,) = module.call([inputs[name] for name in module.INPUTS])
    return {"inputs": inputs, "lists": routed, "output": output}


if __name__ == "__main__":
    cases_path, runs_path, out = (Path(x) for x in sys.argv[1:])
    cases = {case["name"]: case for case in json.loads(cases_path.read_text())}
    accept_arrays_as_indices()
    interpret_launches(out)
    for case, change in json.loads(runs_path.read_text()):
        torch.manual_seed(0)
        torch.save(run(cases[case], change, out), out / f"{case}; {change}.pt")
