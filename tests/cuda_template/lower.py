"""First half of the CUDA-template lane: what Inductor generates for an H200, made without a GPU.

    python lower.py CASES_JSON OUT_DIR

For each case: capture the attention call with Dynamo, say that it was on CUDA, run the passes of
crisp_flex, let Inductor lower it, and write the program (its Triton kernels and the `call` that
launches them) to OUT_DIR/<name>.py, with the order of its inputs in `INPUTS`. Inductor's last step,
loading that program, needs the GPU and is left out.

This patches torch for the whole process: run it as a process of its own.
"""

import json
import sys
from collections import namedtuple
from pathlib import Path

import torch
import torch._inductor.compile_fx
import triton
from graphs import capture, causal, padded_mask
from torch import fx
from torch._dynamo.device_interface import CudaInterface
from torch._guards import TracingContext, tracing
from torch._inductor import config as inductor_config
from torch._inductor.exc import InductorError
from torch._inductor.fx_passes import joint_graph, post_grad
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.utils._pytree import tree_map_only
from triton.backends.compiler import GPUTarget

from crisp_flex import torch_internals
from crisp_flex.config import CrispConfig
from crisp_flex.passes.pipeline import run_passes

CUDA = torch.device("cuda", 0)
H200 = {
    "name": "NVIDIA H200",
    "major": 9,
    "minor": 0,
    "total_memory": 143 << 30,
    "multi_processor_count": 132,
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "warp_size": 32,
    "shared_memory_per_block_optin": 232448,
    "shared_memory_per_block": 49152,
    "gcnArchName": "",
    "L2_cache_size": 60 << 20,
}
PROPERTIES = namedtuple("Properties", H200)(**H200)


class LoweredError(Exception):
    """Carries the generated program out of Inductor, which would load it next."""


class FakeDriver:
    """Triton's driver for a GPU that is not there: Inductor asks it for the target."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


def pretend_h200():
    """Make torch and triton answer as on a machine with one H200; nothing can be run on it."""
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": PROPERTIES,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, _always(answer))
    for name in ("is_available", "device_count", "current_device", "get_device_properties"):
        setattr(CudaInterface, name, staticmethod(_always(answers[name])))
    # Dynamo and AOTAutograd keep the state of the generators over a trace
    torch.cuda.get_rng_state = _always(torch.zeros(16, dtype=torch.uint8))
    torch.cuda.set_rng_state = _always(None)
    triton.runtime.driver.set_active(FakeDriver())


def stop_before_loading():
    """Leave out what Inductor would do with CUDA memory, and stop it with the program's text."""

    def stop(graph):
        code, _ = graph.codegen()
        raise LoweredError(code.value)

    GraphLowering.compile_to_module = stop
    # the pattern matchers trace their patterns on CUDA tensors when they are first used
    joint_graph.lazy_init = post_grad.lazy_init = _always(None)
    # as_strided of a fake CUDA tensor asks the real device
    flex_operator = sys.modules["torch._higher_order_ops.flex_attention"]
    flex_operator._permute_strides = _empty_like_query
    # no worker processes: nothing is compiled
    inductor_config.compile_threads = 1


def lower(case):
    """The program that Inductor generates for one case."""
    with torch.no_grad():
        gm = _capture(case)
        placeholders, fake_mode = _move_to_cuda(gm)
        names = [_input_name(node) for node in gm.graph.find_nodes(op="placeholder")]
        config = CrispConfig(
            min_seqlen=1,
            backend="triton",
            block_size=tuple(case["block_size"]),
            kernel_options=case["kernel_options"],
            **case["config"],
        )
        report = run_passes(gm, config)
        if [site.kernel for site in report.sites] != ["TRITON"]:
            raise RuntimeError(f"{case['name']}: {report}")
        try:
            with tracing(TracingContext(fake_mode)):
                torch_internals.compile_with_inductor(gm, placeholders, {})
        except InductorError as error:
            if isinstance(error.inner_exception, LoweredError):
                return f"{error.inner_exception}\nINPUTS = {names}\n"
            raise
    raise RuntimeError(f"{case['name']}: Inductor did not reach the end of its code generation")


def _capture(case):
    """The Dynamo graph of the attention call, on the CPU."""
    B, Hq, Hkv, L, D = (case[n] for n in ("B", "Hq", "Hkv", "L_compiled", "D"))
    if case["transposed"]:
        inputs = [torch.zeros(B, L, H, D).transpose(1, 2) for H in (Hq, Hkv, Hkv)]
    else:
        inputs = [torch.zeros(B, H, L, D) for H in (Hq, Hkv, Hkv)]
    if case["padding"]:
        inputs.append(torch.ones(B, L, dtype=torch.int64))
    if case["dynamic"]:
        for x in inputs:
            torch._dynamo.mark_dynamic(x, 2 if x.dim() == 4 else 1)
    torch._dynamo.reset()
    return capture(padded_mask if case["padding"] else causal, *inputs)


def _input_name(placeholder):
    # Dynamo calls the argument x of a function L_x_, and a length by its symbol
    name = placeholder.target
    return name.removeprefix("L_").removesuffix("_") if name.startswith("L_") else "L"


def _move_to_cuda(gm):
    """Rewrite a graph captured on the CPU as if its tensors were on CUDA; its fake inputs and mode.

    Nothing is run again: indexing and SDPA on a fake CUDA tensor would ask the real device.
    """
    placeholders = []
    for node in gm.graph.nodes:
        node.args, node.kwargs = fx.node.map_aggregate(
            (node.args, node.kwargs), lambda x: CUDA if isinstance(x, torch.device) else x
        )
        if "example_value" in node.meta:
            value = tree_map_only(FakeTensor, _fake_cuda, node.meta["example_value"])
            node.meta["example_value"] = value
        if node.op == "placeholder":
            placeholders.append(value)
    gm.recompile()
    fake_mode = next(x.fake_mode for x in placeholders if isinstance(x, FakeTensor))
    return placeholders, fake_mode


def _fake_cuda(x):
    with in_kernel_invocation_manager(x.fake_mode):
        meta = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return FakeTensor(x.fake_mode, meta, CUDA)


def _empty_like_query(out, query_strides):
    """Empty, of out's shape, its dims in the order of the query's, the last dim dense."""
    last = out.dim() - 1
    rest = sorted(range(last), key=lambda dim: query_strides[dim])
    strides, step = [0] * out.dim(), 1
    for dim in (last, *rest):
        strides[dim], step = step, step * out.shape[dim]
    return out.new_empty_strided(out.shape, strides)


def _always(answer):
    return lambda *args, **kwargs: answer


if __name__ == "__main__":
    cases, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    pretend_h200()
    stop_before_loading()
    for case in cases:
        (out / f"{case['name']}.py").write_text(lower(case))
