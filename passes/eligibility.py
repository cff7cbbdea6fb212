"""Pass 2: decide whether a site may be rewritten. Every "no" has a reason; reads only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import (
    free_unbacked_symbols,
    statically_known_true,
)

from crisp_flex import torch_internals
from crisp_flex.config import CrispConfig
from crisp_flex.passes.mask_spec import MaskSpec
from crisp_flex.passes.match import SdpaSite
from crisp_flex.passes.node_ops import tensor_of, value_of
from crisp_flex.report import Reason, Rejection

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256
MIN_HEAD_DIM = {"cpu": 8, "cuda": 16}


def check(
    site: SdpaSite, key: fx.Node, value: fx.Node, mask: MaskSpec | None, config: CrispConfig
) -> Rejection | None:
    """None if the site may be rewritten, else the first reason against it.

    Args:
        site: The call.
        key: [B, Hkv, Lkv, D], its key with a repetition of heads taken off (`unrepeat_kv`).
        value: [B, Hkv, Lkv, Dv], likewise.
        mask: The reading of a boolean attn_mask that is computed in the graph, else None.
        config: The settings of this site.

    A length that is only known symbolically is compared with min_seqlen by a guard, so that shorter
    calls get a dense graph of their own. That is the last test: a refused site adds no such guard.
    """
    if not config.enabled:
        return Rejection(Reason.DISABLED)
    if site.nested:
        return Rejection(Reason.NESTED_GRAPH)
    q, k, v, out = (tensor_of(node) for node in (site.query, key, value, site.node))
    if q is None or k is None or v is None or out is None:
        return Rejection(Reason.NO_SHAPES)
    call = _Call(site, q, k, v, out, mask, config)
    return next((no for test in _TESTS for no in test(call)), None)


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
    if not q.dtype == k.dtype == v.dtype:
        yield Rejection(Reason.MIXED_DTYPES, f"{q.dtype}, {k.dtype} and {v.dtype}")
    if q.dtype not in DTYPES:
        yield Rejection(Reason.UNSUPPORTED_DTYPE, str(q.dtype))
    if out.dtype != q.dtype:
        yield Rejection(Reason.AUTOCAST, f"{q.dtype} to {out.dtype}")
    scale = value_of(call.site.scale)
    if scale is not None and (
        not isinstance(scale, (int, float, torch.SymFloat)) or free_unbacked_symbols(scale)
    ):
        yield Rejection(Reason.SCALE_UNKNOWN)


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
    grouped = call.site.enable_gqa is True or Hq == Hkv or repeated
    if Hkv != Hv or Hkv == 0 or Hq % Hkv or Hout != Hq or not grouped:
        yield Rejection(
            Reason.HEADS_MISMATCH, f"Hq={Hq}, Hkv={Hkv}, enable_gqa={call.site.enable_gqa}"
        )


def _meaning(call: _Call) -> Iterator[Rejection]:
    site, mask = call.site, call.mask
    if isinstance(call.q.shape[2], int) and call.q.shape[2] == 1:
        yield Rejection(Reason.DECODE)
    if not isinstance(site.is_causal, bool):
        yield Rejection(Reason.NOT_CAUSAL, "is_causal is computed when the graph runs")
    if site.attn_mask is None:
        if not site.is_causal:
            yield Rejection(Reason.NOT_CAUSAL)
        return
    given = tensor_of(site.attn_mask)
    if site.is_causal:
        yield Rejection(Reason.MASK_WITH_CAUSAL)
    if given is not None and given.dtype != torch.bool:
        yield Rejection(Reason.FLOAT_MASK, str(given.dtype))
    if mask is None:
        yield Rejection(Reason.MASK_IS_INPUT)
    elif not mask.is_plain_causal:
        yield _why_not_causal(mask)


def _why_not_causal(mask: MaskSpec) -> Rejection:
    reading = mask.describe()
    if mask.volatile:
        changed = ", ".join(node.name for node in mask.volatile)
        return Rejection(Reason.MASK_UNREAD, f"{reading}; {changed} is written to behind the mask")
    if mask.other or mask.by_position:
        return Rejection(Reason.MASK_UNREAD, reading)
    if not mask.causal:
        return Rejection(Reason.MASK_NOT_CAUSAL, reading)
    if mask.window is not None or mask.chunk:
        return Rejection(Reason.MASK_WINDOW, reading)
    if mask.documents:
        return Rejection(Reason.MASK_DOCUMENTS, reading)
    if mask.q_offset != 0:
        return Rejection(Reason.MASK_OFFSET, reading)
    if mask.kv_limit is not None:
        return Rejection(Reason.MASK_KV_LIMIT, reading)
    return Rejection(Reason.MASK_UNREAD, reading)


def _length(call: _Call) -> Iterator[Rejection]:
    q, k, v, config = call.q, call.k, call.v, call.config
    Lq, Lkv, Lv = q.shape[2], k.shape[2], v.shape[2]
    padding = call.mask.padding[0] if call.mask is not None and call.mask.padding else None
    source = None if padding is None else tensor_of(padding.source)
    if source is not None and q.device.type == "cpu":
        sizes = [size for t in (q, k, v, source) for size in t.shape]
        if not all(isinstance(size, int) for size in sizes):
            yield Rejection(Reason.CPU_DYNAMIC_PADDING, f"B={q.shape[0]}, Lq={Lq}")
    static = isinstance(Lq, int) and isinstance(Lkv, int)
    if isinstance(Lq, int) and Lq < config.min_seqlen:
        yield Rejection(Reason.TOO_SHORT, f"Lq={Lq}, min_seqlen={config.min_seqlen}")
    # is_causal is top-left aligned, so only a square call may be read as causal. Separate inputs of
    # a dynamic graph have different symbols even when equal: that takes a guard.
    if not statically_known_true(Lq == Lkv) and (static or not bool(Lq == Lkv)):
        yield Rejection(Reason.LENGTHS_DIFFER, f"Lq={Lq}, Lkv={Lkv}")
    if not statically_known_true(Lkv == Lv) and not bool(Lkv == Lv):
        yield Rejection(Reason.LENGTHS_DIFFER, f"Lkv={Lkv} of the key, {Lv} of the value")
    width = Lkv if source is None else source.shape[1]
    if not statically_known_true(width == Lkv) and not bool(width >= Lkv):
        yield Rejection(Reason.LENGTHS_DIFFER, f"Lkv={Lkv}, {width} in the padding mask")
    if not bool(Lq >= config.min_seqlen):
        yield Rejection(Reason.TOO_SHORT, f"Lq={Lq}, min_seqlen={config.min_seqlen}")


_TESTS: tuple[Callable[[_Call], Iterator[Rejection]], ...] = (_kind, _shape, _meaning, _length)
