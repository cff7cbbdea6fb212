"""Pass 2: decide whether a site may be rewritten. Every "no" has a reason; reads only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import (
    free_unbacked_symbols,
    statically_known_true,
)

from crisp_flex import toolchain, torch_internals
from crisp_flex.config import CrispConfig
from crisp_flex.passes.mask_spec import MaskSpec
from crisp_flex.passes.match import SdpaSite
from crisp_flex.passes.node_ops import shape_of, size_expr, tensor_of, value_of
from crisp_flex.passes.placement import Placement, place
from crisp_flex.passes.size_nodes import can_build
from crisp_flex.passes.token_ids import can_build_ids
from crisp_flex.report import Reason, Rejection

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256
MIN_HEAD_DIM = {"cpu": 8, "cuda": 16}
# Query blocks from which on a chunk may be sparse, whatever it looks back on.
_CHUNK_BLOCKS = 8


def check(
    site: SdpaSite, key: fx.Node, value: fx.Node, mask: MaskSpec | None, config: CrispConfig
) -> Placement | Rejection:
    """How the mask of a site that may be rewritten reads, else the first reason against it.

    Args:
        site: The call.
        key: [B, Hkv, Lkv, D], its key with a repetition of heads taken off (`unrepeat_kv`).
        value: [B, Hkv, Lkv, Dv], likewise.
        mask: The reading of an attn_mask that is computed in the graph, else None.
        config: The settings of this site.

    A length that is only known symbolically is compared with min_seqlen by a guard, so that shorter
    calls get a dense graph of their own. That comes behind all that is known without guards.
    """
    if not config.enabled:
        return Rejection(Reason.DISABLED)
    if site.nested:
        return Rejection(Reason.NESTED_GRAPH)
    q, k, v, out = (tensor_of(node) for node in (site.query, key, value, site.node))
    if q is None or k is None or v is None or out is None:
        return Rejection(Reason.NO_SHAPES)
    call = _Call(site, q, k, v, out, mask, config)
    return next((no for test in _TESTS for no in test(call)), None) or _place(call)


@dataclass(frozen=True, slots=True)
class _Call:
    """A site with the fake tensors of its un-repeated arguments and of its result."""

    site: SdpaSite
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    mask: MaskSpec | None
    config: CrispConfig


def _kind(call: _Call) -> Iterator[Rejection]:
    q, k, v, out = call.q, call.k, call.v, call.out
    if not all(map(torch_internals.is_plain, (q, k, v, out))):
        yield Rejection(Reason.NOT_PLAIN_TENSOR)
    if not q.dim() == k.dim() == v.dim() == out.dim() == 4:
        yield Rejection(Reason.NOT_FOUR_DIMENSIONAL, f"{q.dim()}, {k.dim()} and {v.dim()}")
    if any(free_unbacked_symbols(size) for t in (q, k, v) for size in t.shape):
        yield Rejection(Reason.UNBACKED_SHAPE)
    if call.site.dropout_p != 0:
        yield Rejection(Reason.HAS_DROPOUT, f"dropout_p={call.site.dropout_p}")
    if out.requires_grad:
        yield Rejection(Reason.NEEDS_GRAD)
    if q.device.type not in MIN_HEAD_DIM:
        yield Rejection(Reason.UNSUPPORTED_DEVICE, str(q.device))
    if q.device.type == "cpu" and not torch_internals.cpu_has_flex():
        yield Rejection(Reason.CPU_LACKS_FLEX)
    if problem := toolchain.missing(q.device.type):
        yield Rejection(Reason.NO_COMPILER, problem)
    if not q.dtype == k.dtype == v.dtype == out.dtype:
        dtypes = f"{q.dtype}, {k.dtype} and {v.dtype} to {out.dtype}"
        yield Rejection(Reason.MIXED_DTYPES, dtypes)
    if q.dtype not in DTYPES:
        yield Rejection(Reason.UNSUPPORTED_DTYPE, str(q.dtype))
    scale = value_of(call.site.scale)
    if scale is not None and (
        not isinstance(scale, (int, float, torch.SymFloat)) or free_unbacked_symbols(scale)
    ):
        yield Rejection(Reason.SCALE_UNKNOWN)
    if call.site.softcap is not None:
        cap = value_of(call.site.softcap)
        if (
            not isinstance(cap, (int, float, torch.SymFloat))
            or free_unbacked_symbols(cap)
            or not bool(cap > 0)
        ):
            yield Rejection(Reason.CAP_UNKNOWN, str(cap))


def _shape(call: _Call) -> Iterator[Rejection]:
    q, k, v, out = call.q, call.k, call.v, call.out
    least = MIN_HEAD_DIM[q.device.type]
    # dynamic=True makes heads and head dims of plain inputs symbolic; int() guards, as
    # flex_attention() itself does
    D, Dv = int(q.shape[3]), int(v.shape[3])
    if not all(least <= d <= MAX_HEAD_DIM for d in (D, Dv)):
        yield Rejection(Reason.HEAD_DIM, f"D={D}, Dv={Dv}, not in [{least}, {MAX_HEAD_DIM}]")
    # a mask may broadcast the query to a larger batch
    batches = [t.shape[0] for t in (q, k, v, out)]
    if not all(statically_known_true(size == batches[0]) for size in batches):
        yield Rejection(Reason.BATCH_MISMATCH, ", ".join(map(str, batches)))
    Hq, Hkv, Hv, Hout = (int(t.shape[1]) for t in (q, k, v, out))
    given_key = tensor_of(call.site.key)
    repeated = given_key is not None and int(given_key.shape[1]) == Hq
    # one key head is broadcast without enable_gqa, too
    grouped = call.site.enable_gqa is True or Hq == Hkv or Hkv == 1 or repeated
    if Hkv != Hv or Hkv == 0 or Hq % Hkv or Hout != Hq or not grouped:
        yield Rejection(
            Reason.HEADS_MISMATCH, f"Hq={Hq}, Hkv={Hkv}, enable_gqa={call.site.enable_gqa}"
        )


def _meaning(call: _Call) -> Iterator[Rejection]:
    site, mask = call.site, call.mask
    if isinstance(call.q.shape[2], int) and call.q.shape[2] == 1:
        yield Rejection(Reason.DECODE)
    if site.sinks is not None and call.q.device.type == "cpu":
        yield Rejection(Reason.CPU_SINKS)
    if not isinstance(site.is_causal, bool):
        yield Rejection(Reason.NOT_CAUSAL, "is_causal is computed when the graph runs")
    if site.attn_mask is None:
        if not site.is_causal:
            yield Rejection(Reason.NOT_CAUSAL)
        return
    given = tensor_of(site.attn_mask)
    if site.is_causal:
        yield Rejection(Reason.MASK_WITH_CAUSAL)
    additive = given is not None and given.dtype != torch.bool
    if mask is None:
        yield Rejection(Reason.FLOAT_MASK if additive else Reason.MASK_IS_INPUT)
    elif additive and mask.other:
        yield Rejection(Reason.FLOAT_MASK, mask.describe())
    elif mask.finite and not mask.rows_see_something:
        yield Rejection(Reason.FLOAT_MASK, f"{mask.describe()}; a row may be all minimum")
    elif mask.other or mask.by_position or len(mask.padding) > 1:
        yield Rejection(Reason.MASK_UNREAD, mask.describe())
    elif not mask.causal:
        yield Rejection(Reason.MASK_NOT_CAUSAL, mask.describe())
    elif len(mask.same) > 1:
        yield _separates(mask)


def _separates(mask: MaskSpec) -> Rejection:
    return Rejection(
        Reason.MASK_DOCUMENTS if mask.documents else Reason.MASK_CHUNKS, mask.describe()
    )


def _length(call: _Call) -> Iterator[Rejection]:
    q, k, v, mask = call.q, call.k, call.v, call.mask
    Lq, Lkv, Lv = q.shape[2], k.shape[2], v.shape[2]
    if mask is not None and (mask.padding or mask.same) and q.device.type == "cpu":
        read = [tensor_of(load.source) for load in mask.padding]
        read += [tensor_of(node) for same in mask.same for _, node in same.sources]
        sizes = [size for t in (q, k, v, *read) if t is not None for size in t.shape]
        if not all(isinstance(size, int) for size in sizes):
            yield Rejection(Reason.CPU_DYNAMIC_PADDING, f"B={q.shape[0]}, Lq={Lq}")
    if not statically_known_true(Lkv == Lv) and not bool(Lkv == Lv):
        yield Rejection(Reason.LENGTHS_DIFFER, f"Lkv={Lkv} of the key, {Lv} of the value")
    if not _pays(call):
        detail = f"Lq={Lq}, Lkv={Lkv}, min_seqlen={call.config.least_tokens}"
        yield Rejection(Reason.TOO_SHORT, detail)


def _pays(call: _Call) -> bool:
    """Whether the call has at least the work of a whole prompt of min_seqlen tokens.

    A whole prompt: Lq >= min_seqlen. A chunk behind other keys: as many visible pairs, and so many
    query blocks that exact rows are few of them (four blocks are audited over all keys). Symbolic
    lengths are compared by a guard.
    """
    sizes, mask, least = torch_internals.Sizes(call.q), call.mask, call.config.least_tokens
    Lq = size_expr(call.q.shape[2])
    seen = Lq if mask is None else Lq + mask.q_offset
    if mask is not None and mask.tensors(seen):  # the limit tells how far a cache is filled
        seen = Lq if mask.kv_limit is None or mask.tensors(mask.kv_limit) else mask.kv_limit
    if seen == Lq:
        return sizes.hold(sympy.Ge(Lq, least))
    fewest = min(least, _CHUNK_BLOCKS * call.config.tokens_per_block[0])
    pairs = sympy.expand(Lq * (2 * seen - Lq))  # visible ones, twice
    return sizes.hold(sympy.Ge(Lq, fewest)) and sizes.hold(sympy.Ge(pairs, least**2))


def _place(call: _Call) -> Placement | Rejection:
    reading = "causal" if call.mask is None else call.mask.describe()
    placed = place(call.q, call.k, call.mask, reading=reading)
    if isinstance(placed, Rejection):
        return placed
    graph = call.site.node.graph
    if placed.cut and not can_build(graph, placed.Lkv):
        return Rejection(Reason.MASK_OFFSET, reading)
    if placed.same is not None and call.mask is not None:
        sources = dict(placed.same.sources)
        devices = {
            tensor.device for node in sources.values() if (tensor := tensor_of(node)) is not None
        }
        needed = [placed.same.of_query, placed.same.of_key, placed.Lkv]
        needed += [size_expr(call.q.shape[dim]) for dim in (0, 2)]
        if elsewhere := ", ".join(sorted(map(str, devices - {call.q.device}))):
            return Rejection(Reason.MASK_DEVICE, f"ids on {elsewhere}, query on {call.q.device}")
        if not all(can_build_ids(graph, x, sources) for x in needed):
            return _separates(call.mask)
    if placed.padding is not None:
        start, sizes = placed.padding.kv_offset, torch_internals.Sizes(call.q)
        rows, width = shape_of(placed.padding.source)
        source = tensor_of(placed.padding.source)
        if source is None or source.device != call.q.device:
            at = "no device" if source is None else source.device
            return Rejection(Reason.MASK_DEVICE, f"padding on {at}, query on {call.q.device}")
        B = size_expr(call.q.shape[0])
        if not can_build(graph, start):
            return Rejection(Reason.MASK_OFFSET, reading)
        if placed.padding.per_batch and not sizes.hold(sympy.Eq(rows, B)):
            return Rejection(Reason.BATCH_MISMATCH, f"{B}, {rows} in the padding mask")
        if not sizes.hold(sympy.Ge(width, start + placed.Lkv)):
            return Rejection(
                Reason.LENGTHS_DIFFER, f"Lkv={placed.Lkv}, {width} in the padding mask"
            )
    return placed


_TESTS: tuple[Callable[[_Call], Iterator[Rejection]], ...] = (_kind, _shape, _meaning, _length)
