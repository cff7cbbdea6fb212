"""The operators crisp_flex::route and crisp_flex::realize: schema, fake, dispatch; torch only.

    route(query, key, key_valid?, <RouteParams>)
        -> (kv_num_blocks, kv_buffer, full_kv_num_blocks, stats)

kv_buffer holds both index lists of FlexAttention, so that they have equal strides (torch 2.11 needs
it): the partial list is kv_buffer[..., :Nkv], the full list kv_buffer[..., P:], with
P = `partial_slots`.
The kernels and the eager reference are imported when a call is dispatched to them, not before.
`watch` shows each call with its tensors; while nothing watches that costs one test of a tuple.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from crisp_flex import toolchain
from crisp_flex.routing.geometry import partial_slots
from crisp_flex.routing.params import STAT_NAMES, RouteParams

RouteResult = tuple[Tensor, Tensor, Tensor, Tensor]
Observer = Callable[[int, Tensor, Tensor, Tensor, Tensor], None]


@dataclasses.dataclass(frozen=True, slots=True)
class RouteCall:
    """One run of the op, as `watch` shows it; the tensors are the op's own: do not change them.

    Args:
        query: [B, Hq, Lq, D].
        key: [B, Hkv, Lkv, D].
        key_valid: [B, Lkv] bool or None.
        params: The op's scalar arguments.
        q_offset: [1] integer or None.
        value: [B, Hkv, Lkv, Dv], None for a policy that does not read the values.
        site: Number of the attention call in its graph, -1 where there is no graph.
        result: What the op returns.
    """

    query: Tensor
    key: Tensor
    key_valid: Tensor | None
    params: RouteParams
    q_offset: Tensor | None
    value: Tensor | None
    site: int
    result: RouteResult


Watcher = Callable[[RouteCall], None]

# replaced, never changed: a thread that is in a call goes on with the tuple that it has
_watchers: tuple[Watcher, ...] = ()
_lock = threading.Lock()

_PARAMS = ", ".join(f"{f.type} {f.name}" for f in dataclasses.fields(RouteParams))
torch.library.define(
    "crisp_flex::route",
    f"(Tensor query, Tensor key, Tensor? key_valid, {_PARAMS}, *, Tensor? q_offset=None, "
    "Tensor? value=None, int site=-1)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order),
)
torch.library.define(
    "crisp_flex::realize", "(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)


def route(
    query: Tensor,
    key: Tensor,
    key_valid: Tensor | None,
    params: RouteParams,
    q_offset: Tensor | None = None,
    value: Tensor | None = None,
) -> RouteResult:
    """Choose the KV blocks of every query block.

    Args:
        query: [B, Hq, Lq, D], fp32, fp16 or bf16, any strides.
        key: [B, Hkv, Lkv, D], Hq a multiple of Hkv, Lkv >= Lq; query i sees keys
            0 .. i + Lkv - Lq.
        key_valid: [B, Lkv] bool, False where a key is padding; None if every key is valid.
        params: Scale, block sizes and policy.
        q_offset: [1] integer position of query 0 where it is only known when the graph runs (a
            cache longer than its filling): query i sees keys 0 .. i + q_offset. None is Lkv - Lq.
        value: [B, Hkv, Lkv, Dv] for a policy that reads the values (`RouteParams.reads_values`),
            any strides. Not passed on for another one, for which V need not live as long.

    Returns:
        kv_num_blocks: [B, Hq, Nq] int32, partial blocks of each query block.
        kv_buffer: [B, Hq, Nq, P + Nkv] int32, contiguous; both lists ascend, see the module's text.
        full_kv_num_blocks: [B, Hq, Nq] int32, blocks in which every pair is visible.
        stats: [B, Hq, len(STAT_NAMES)] fp32.

    Raises:
        ValueError: The policy reads the values, and they are not there.
    """
    result: RouteResult = torch.ops.crisp_flex.route.default(
        query,
        key,
        key_valid,
        *params.as_args(),
        q_offset=q_offset,
        value=value if params.reads_values else None,
    )
    return result


@contextlib.contextmanager
def observe(callback: Observer) -> Iterator[None]:
    """While active, call callback(call_index, kv_num_blocks, kv_buffer, full_kv_num_blocks, stats).

    It sees each run of the op in this process, in order, call_index from 0. The tensors are the
    op's own outputs: read them, do not change them.
    """
    count = iter(range(1 << 62))
    with watch(lambda call: callback(next(count), *call.result)):
        yield


@contextlib.contextmanager
def watch(watcher: Watcher) -> Iterator[None]:
    """While active, call watcher(RouteCall) after each run of the op, in the thread that runs it.

    All threads of the process are seen. What the op does inside a CUDA graph is seen once, when it
    is captured.
    """
    global _watchers
    with _lock:
        _watchers = (*_watchers, watcher)
    try:
        yield
    finally:
        with _lock:
            left = list(_watchers)
            left.remove(watcher)
            _watchers = tuple(left)


def watched() -> bool:
    """Whether anything watches the op now."""
    return bool(_watchers)


@torch.library.impl("crisp_flex::route", "cpu")
def _route_cpu(
    query: Tensor,
    key: Tensor,
    key_valid: Tensor | None,
    *args: float | int | str,
    q_offset: Tensor | None = None,
    value: Tensor | None = None,
    site: int = -1,
) -> RouteResult:
    from crisp_flex.routing import reference

    params = _params(args)
    result = reference.route(query, key, key_valid, params, q_offset, value)
    return _shown(query, key, key_valid, params, q_offset, value, site, result)


@torch.library.impl("crisp_flex::route", "cuda")
def _route_cuda(
    query: Tensor,
    key: Tensor,
    key_valid: Tensor | None,
    *args: float | int | str,
    q_offset: Tensor | None = None,
    value: Tensor | None = None,
    site: int = -1,
) -> RouteResult:
    params = _params(args)
    if has_kernels(query, key, params):
        from crisp_flex.routing.kernels import dispatch

        result = dispatch.route(query, key, key_valid, params, q_offset, value)
    else:
        from crisp_flex.routing import reference

        result = reference.route(query, key, key_valid, params, q_offset, value)
    return _shown(query, key, key_valid, params, q_offset, value, site, result)


def has_kernels(query: Tensor, key: Tensor, params: RouteParams) -> bool:
    """Whether Triton kernels choose the blocks of this call on CUDA; else the reference does.

    One warning where there are none because Triton is missing or broken.
    """
    if problem := toolchain.missing("cuda"):
        toolchain.warn_once(f"{problem}. Until then blocks are chosen by plain PyTorch")
        return False
    from crisp_flex.routing.kernels import dispatch  # imports Triton

    return dispatch.supports(query, key, params)


def _shown(
    query: Tensor,
    key: Tensor,
    key_valid: Tensor | None,
    params: RouteParams,
    q_offset: Tensor | None,
    value: Tensor | None,
    site: int,
    result: RouteResult,
) -> RouteResult:
    """result, after all who watch have seen the call: the fields of a RouteCall."""
    watchers = _watchers
    if watchers:
        call = RouteCall(query, key, key_valid, params, q_offset, value, site, result)
        for watcher in watchers:
            watcher(call)
    return result


@torch.library.register_fake("crisp_flex::route")
def _route_fake(
    query: Tensor,
    key: Tensor,
    key_valid: Tensor | None,
    *args: float | int | str,
    q_offset: Tensor | None = None,
    value: Tensor | None = None,
    site: int = -1,
) -> RouteResult:
    params = _params(args)
    B, Hq, Lq = query.shape[:3]
    Nq = (Lq + params.block_q - 1) // params.block_q
    Lkv = key.shape[2]
    Nkv = (Lkv + params.block_kv - 1) // params.block_kv
    P = partial_slots(
        params.block_q, params.block_kv, Lq, Lkv, key_valid is not None, q_offset is not None
    )
    kv_num_blocks = query.new_empty((B, Hq, Nq), dtype=torch.int32)
    kv_buffer = query.new_empty((B, Hq, Nq, P + Nkv), dtype=torch.int32)
    stats = query.new_empty((B, Hq, len(STAT_NAMES)), dtype=torch.float32)
    return kv_num_blocks, kv_buffer, torch.empty_like(kv_num_blocks), stats


@torch.library.impl("crisp_flex::realize", ("cpu", "cuda"))
def _realize(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


@torch.library.register_fake("crisp_flex::realize")
def _realize_fake(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _params(args: tuple[float | int | str, ...]) -> RouteParams:
    names = (f.name for f in dataclasses.fields(RouteParams))
    return RouteParams(**dict(zip(names, args, strict=True)))  # type: ignore[arg-type]
