"""The only file that touches private torch names; everything else asks here.

Run on torch 2.11.0 (H200, CUDA 13.0) and 2.13.0 (CPU). What is used, and what would notice a
change: the operators `flex_attention` and `invoke_subgraph` (tests/test_end_to_end.py), the field
order of `BlockMask.as_tuple()` (13 fields in 2.11 and 2.12, 17 in 2.13: read off, not copied),
`torch._inductor.compile_fx` and its option lists (tests/test_models.py), `flex_cpu` (the C++
kernel's own test), `CompileContext`, `SymNode.guard_float`, `.expr` and `.hint`, the identity of a
storage, operator schemas, and the names of vmap and F.pad in a Dynamo graph (tests/passes).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
import torch._inductor
from torch import fx
from torch._functorch import predispatch
from torch._inductor.exc import (
    GPUTooOldForTriton,
    InductorError,
    InvalidCxxCompiler,
    TritonMissing,
)
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = [
    "ADD_BATCH_DIM",
    "COMPILE_ERRORS",
    "FLASH_NEEDS",
    "FLEX_ATTENTION",
    "INVOKE_SUBGRAPH",
    "PADS",
    "REMOVE_BATCH_DIM",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "Sizes",
    "block_mask_fields",
    "compile_apart",
    "compile_with_inductor",
    "copy_source",
    "counted_graph_breaks",
    "cpp_compiler",
    "cpu_has_flex",
    "current_compile_id",
    "inductor_modes",
    "inductor_settings",
    "is_compiled",
    "is_plain",
    "profiling",
    "size_expr",
    "size_hint",
    "specialise_float",
    "storage_id",
    "symbols_of",
    "uncompiled_call",
    "written_arguments",
]

FLEX_ATTENTION = torch.ops.higher_order.flex_attention
INVOKE_SUBGRAPH = torch.ops.higher_order.invoke_subgraph
# F.pad in a Dynamo graph, by its two names
PADS = (torch.nn.functional.pad, torch._C._nn.pad)
# (x, in_dim, level) and (x, level, size, out_dim): torch.vmap in a Dynamo graph
ADD_BATCH_DIM = predispatch._add_batch_dim
REMOVE_BATCH_DIM = predispatch._remove_batch_dim
# what Inductor raises where it cannot compile a graph, whatever the cause
COMPILE_ERRORS = (InductorError, TritonMissing, GPUTooOldForTriton)
# what the code that Inductor makes for FLASH imports from flash-attn-4
FLASH_NEEDS = (
    ("flash_attn.cute", "__name__"),
    ("flash_attn.cute.interface", "_flash_attn_fwd"),
    ("flash_attn.cute.block_sparsity", "BlockSparseTensorsTorch"),
)


@functools.cache
def block_mask_fields() -> tuple[str | None, ...]:
    """The order of the operator's block-mask tuple, read off BlockMask with sentinels.

    Returns:
        Per field its name ("kv_num_blocks", ..., "Lq", "Lkv", "block_q", "block_kv", "mask_mod"),
        or None where the operator takes None for inference.
    """
    tensors: dict[str, Any] = {
        name: torch.empty((1, 1, 1, 1), device="meta")
        for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    }
    numbers = {-11: "Lq", -12: "Lkv", -13: "block_q", -14: "block_kv"}
    template = BlockMask(
        seq_lengths=(-11, -12),
        **tensors,
        q_num_blocks=None,
        q_indices=None,
        full_q_num_blocks=None,
        full_q_indices=None,
        BLOCK_SIZE=(-13, -14),
        mask_mod=_sentinel_mod,
    )
    by_id = {id(tensor): name for name, tensor in tensors.items()}
    by_id[id(_sentinel_mod)] = "mask_mod"
    fields: list[str | None] = []
    for entry in template.as_tuple():
        if entry is None:
            fields.append(None)
        elif isinstance(entry, int):
            fields.append(numbers[entry])
        else:
            fields.append(by_id[id(entry)])
    return tuple(fields)


def _sentinel_mod(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    return q_idx < 0


def cpu_has_flex() -> bool:
    """Whether Inductor's C++ FlexAttention kernel runs on this CPU."""
    from torch._inductor.kernel.flex import flex_cpu

    return bool(flex_cpu.check_cpu_supported())


def cpp_compiler() -> str | None:
    """The C++ compiler that Inductor takes; None where it finds none that runs."""
    from torch._inductor import cpp_builder

    try:
        return str(cpp_builder.get_cpp_compiler())
    except (InvalidCxxCompiler, OSError):  # OSError: the file is there and is no program
        return None


def compile_with_inductor(
    gm: fx.GraphModule, example_inputs: Sequence[Any], patches: Mapping[str, Any]
) -> Callable[..., Any]:
    """Hand a Dynamo graph to Inductor under config patches."""
    from torch._inductor.compile_fx import compile_fx

    compiled: Any = compile_fx(gm, list(example_inputs), config_patches=dict(patches))
    return compiled  # type: ignore[no-any-return]


def inductor_modes() -> dict[str, dict[str, Any]]:
    """The modes of torch.compile and the Inductor settings that each stands for."""
    return torch._inductor.list_mode_options()


def inductor_settings() -> frozenset[str]:
    """The names of Inductor's settings."""
    return frozenset(torch._inductor.list_options())


def current_compile_id() -> str:
    """Dynamo's id of the frame being compiled ("0/1"), "-" outside a compilation."""
    from torch._guards import CompileContext

    return str(CompileContext.current_compile_id() or "-")


def specialise_float(value: float | torch.SymFloat) -> float:
    """The number behind a SymFloat, with a guard that the graph holds for this number only."""
    if isinstance(value, torch.SymFloat):
        return float(value.node.guard_float(__file__, 0))
    return float(value)


def size_expr(size: int | torch.SymInt) -> sympy.Expr | None:
    """A size as a sympy integer expression, with no guard; None for a kind without expressions."""
    if not isinstance(size, torch.SymInt):
        return sympy.Integer(size)
    expr = getattr(size.node, "expr", None)
    return expr if isinstance(expr, sympy.Expr) else None


class Sizes:
    """Decides facts about the sizes of the tensors of a graph, by guards where it must.

    Args:
        tensor: Any fake tensor of the graph.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._env = getattr(getattr(tensor, "fake_mode", None), "shape_env", None)

    def known(self, fact: sympy.Basic) -> bool:
        """Whether a relation holds for all sizes that the graph takes."""
        if fact in (True, False):
            return bool(fact)
        return self._env is not None and statically_known_true(self._env.create_symboolnode(fact))

    def hold(self, fact: sympy.Basic) -> bool:
        """Whether a relation holds for the sizes that the graph is compiled for, made a guard.

        False, without a guard, where a size is only known when the graph runs.
        """
        if self.known(fact):
            return True
        if self._env is None or self.known(sympy.Not(fact)) or free_unbacked_symbols(fact):
            return False
        return bool(self._env.create_symboolnode(fact))

    def number(self, size: sympy.Expr) -> int | None:
        """The number that a size is, made a guard; None where only the run of the graph tells."""
        if size.is_Integer:
            return int(size)
        if self._env is None or free_unbacked_symbols(size):
            return None
        return int(self._env.evaluate_expr(size))


def symbols_of(value: object) -> set[sympy.Symbol]:
    """The symbol that a SymInt is, before and after what guards have found equal; else nothing."""
    if not isinstance(value, torch.SymInt):
        return set()
    exprs = (getattr(value.node, name, None) for name in ("_expr", "expr"))
    return {expr for expr in exprs if isinstance(expr, sympy.Symbol)}


def size_hint(size: int | torch.SymInt) -> int | None:
    """The size that a graph is being compiled for, with no guard; None where there is none."""
    if not isinstance(size, torch.SymInt):
        return size
    hint = getattr(size.node, "hint", None)
    return hint if isinstance(hint, int) else None


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is dense, of no wrapper subclass, and under no torch.func transform."""
    return (
        tensor.layout == torch.strided
        and not tensor.is_nested
        and not is_traceable_wrapper_subclass(tensor)
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def uncompiled_call(model: Callable[..., Any]) -> Callable[..., Any]:
    """What `model(...)` does, hooks included, without the compilation of `Module.compile`."""
    return model._call_impl if isinstance(model, torch.nn.Module) else model


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether calls of module go to what `torch.compile` or `Module.compile` made of it."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def compile_apart(
    fn: Callable[..., Any],
    backend: Callable[..., Any] | str,
    **options: Any,  # noqa: ANN401
) -> Callable[..., Any]:
    """fn under torch.compile, with nothing left in the caches that another compilation looks into.

    Dynamo keeps what it compiled on code objects and counts the entries towards its recompile
    limit: the outer frame gets a code object of its own, and where torch can (2.13), the entries of
    inner frames, which there are behind graph breaks, are kept apart too.
    """

    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return fn(*args, **kwargs)

    apart = types.FunctionType(
        call.__code__.replace(), call.__globals__, "call", None, call.__closure__
    )
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        options["isolate_recompiles"] = True
    compiled: Callable[..., Any] = torch.compile(apart, backend=backend, **options)
    return compiled


def copy_source(placeholder: fx.Node, copied: fx.Node) -> None:
    """Give a copy of a Dynamo placeholder what AOTAutograd asks of it: where the input is from."""
    if hasattr(placeholder, "_dynamo_source"):
        copied._dynamo_source = placeholder._dynamo_source  # type: ignore[attr-defined]


@contextlib.contextmanager
def counted_graph_breaks() -> Iterator[list[str]]:
    """Yields a list that has, after the block, the reason of each graph break that Dynamo met."""
    from torch._dynamo.utils import counters

    before = dict(counters["graph_break"])
    found: list[str] = []
    yield found
    for reason, count in counters["graph_break"].items():
        found += [str(reason)] * (count - before.get(reason, 0))


def storage_id(tensor: torch.Tensor) -> int | None:
    """Equal for views of one tensor; None where the storage is hidden (under vmap)."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:
        return None


def written_arguments(
    target: OpOverload | OpOverloadPacket,
) -> Iterator[tuple[int | None, str]]:
    """The arguments an ATen operator may write to: (position, None if by keyword only; name)."""
    overloads = (
        [target]
        if isinstance(target, OpOverload)
        else [getattr(target, name) for name in target.overloads()]  # type: ignore[no-untyped-call]
    )
    for overload in overloads:
        for position, argument in enumerate(overload._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield None if argument.kwarg_only else position, argument.name


def profiling() -> bool:
    """Whether torch.profiler or emit_nvtx records now."""
    return bool(torch._C._autograd._profiler_enabled())
