"""What a site becomes: its mask's nodes, mask_mod, kernel and options, for rewrite.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from crisp_flex import flex_hop, torch_internals
from crisp_flex.config import CrispConfig
from crisp_flex.mask_mods import mask_mod
from crisp_flex.passes.mask_nodes import MaskNodes
from crisp_flex.passes.match import SdpaSite
from crisp_flex.passes.node_ops import size_expr, value_of
from crisp_flex.passes.placement import Placement
from crisp_flex.passes.sparse_call import attend, size_of
from crisp_flex.routing.geometry import partial_slots
from crisp_flex.routing.params import RouteParams


@dataclass(frozen=True, slots=True)
class Plan:
    """What one site becomes, whatever head groups it is computed in."""

    # (Lq, Lkv) in the graph; the same node where both are one symbol.
    lengths: tuple[int | fx.Node, int | fx.Node]
    key_valid: fx.Node | None
    # Position of query 0 if a tensor has it, and what else mask_mod captures.
    q_offset: fx.Node | None
    captured: tuple[fx.Node, ...]
    mask_mod: Callable[..., Any]
    # Block lists that need no routing.
    lists: list[fx.Node] | None
    # Slots for partial blocks; None where both lists are equally wide.
    partial: int | None
    params: RouteParams
    options: dict[str, Any]
    kernel: str
    # Cap on the logits, and the [Hq] sinks.
    softcap: float | None
    sinks: fx.Node | None
    # Sizes and dtypes of query, key and value; None where a size is none a region can take.
    shapes: str | None

    def attend(
        self,
        gm: fx.GraphModule,
        operands: list[fx.Node],
        lengths: tuple[int | fx.Node, int | fx.Node],
    ) -> fx.Node:
        """flex_attention over operands, as `sparse_call.attend` takes them; its tuple."""
        return attend(
            gm,
            operands,
            lengths,
            (self.params.block_q, self.params.block_kv),
            self.params.scale,
            self.options,
            self.kernel,
            self.mask_mod,
            self.partial,
            self.softcap,
        )


def plan_call(
    masks: MaskNodes,
    site: SdpaSite,
    key: fx.Node,
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    placed: Placement,
    config: CrispConfig,
) -> Plan:
    """The mask's nodes, the kernel and its options.

    Args:
        masks: Makes the mask's nodes, at the graph's insertion point.
        site: The call.
        key: Its key, cut to the keys that are seen.
        given: Fake query, key and value, before the cut.
        placed: Where the queries stand.
        config: Of the site.
    """
    graph, (q, k, v) = masks.graph, given
    key_valid = masks.key_valid(site, placed)
    offset = masks.offset(site, placed, key)
    at = offset if isinstance(offset, fx.Node) else None
    q_offset = at if placed.moved is not None else None
    lists = None
    ids: tuple[fx.Node, ...] = ()
    if placed.same is not None:
        ids = pair = masks.ids(site, placed, placed.same)
        lists = masks.segments(site, placed, key, key_valid, pair, q_offset, config)
    elif placed.window is not None:
        lists = masks.window(site, placed, key, key_valid, q_offset, config)
    captured = tuple(node for node in (at, key_valid, *ids) if node is not None)
    D, Lq = int(q.shape[3]), size_expr(q.shape[2])
    kernel = flex_hop.choose_kernel(
        q.device,
        q.dtype,
        D=D,
        Dv=int(v.shape[3]),
        block_size=config.tokens_per_block,
        backend=config.backend,
        # FLASH has not been tried with the one head of a window's lists, nor with a score_mod
        captures=bool(captured) or lists is not None or not site.is_plain,
    )
    divisible = all(
        length.is_Integer and length % max(128, *config.tokens_per_block) == 0
        for length in (Lq, placed.Lkv)
    )
    options = flex_hop.kernel_options(
        kernel,
        device=q.device,
        dtype=q.dtype,
        D=D,
        divisible=divisible,
        user=config.kernel_options,
        block_size=config.tokens_per_block,
    )
    options["OUTPUT_LOGSUMEXP"] |= site.sinks is not None
    partial = None
    if lists is None and key_valid is None:
        square = offset == 0 and placed.moved is None
        partial = partial_slots(*config.tokens_per_block, 0, 0 if square else 1, False)
    lengths = [
        int(length) if length.is_Integer else size_of(graph, node, 2)
        for length, node in ((Lq, site.query), (placed.Lkv, key))
    ]
    if offset == 0 and isinstance(lengths[0], fx.Node):
        lengths[1] = lengths[0]
    return Plan(
        lengths=(lengths[0], lengths[1]),
        key_valid=key_valid,
        q_offset=q_offset,
        captured=captured,
        mask_mod=mask_mod(
            offset=offset if isinstance(offset, int) else None,
            window=placed.window,
            padded=key_valid is not None,
            same=placed.same is not None,
        ),
        lists=lists,
        partial=partial,
        params=RouteParams.from_config(config, D=D, scale=_scale(site, D)),
        softcap=None if site.softcap is None else _number(site, site.softcap),
        sinks=site.sinks,
        options=options,
        kernel=kernel,
        shapes=_region_shapes(q, k, v, placed.Lkv),
    )


def _scale(site: SdpaSite, D: int) -> float:
    if site.scale is None:
        return 1.0 / math.sqrt(D)
    return _number(site, site.scale)


def _number(site: SdpaSite, given: float | fx.Node) -> float:
    number = value_of(given)
    if not isinstance(number, (int, float, torch.SymFloat)):
        raise ValueError(f"{site.node.name} is given {number!r}: check() lets none through")
    return torch_internals.specialise_float(number)


def _region_shapes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, Lkv: sympy.Expr
) -> str | None:
    """Sizes and dtype of query, key and value, K and V of Lkv keys; None where no region fits."""
    sizes = [(x.shape[0], x.shape[1], x.shape[3]) for x in (k, v)]
    if not Lkv.is_Atom or not flex_hop.sizes_fit_region([*q.shape, *sizes[0], *sizes[1]]):
        return None
    return str((tuple(q.shape), sizes, Lkv, q.dtype))
