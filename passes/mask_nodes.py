"""The nodes a mask turns into: valid keys, the position of the queries, lists of windows."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass, field

import sympy
import torch
from torch import fx

from crisp_flex import torch_internals
from crisp_flex.config import CrispConfig
from crisp_flex.passes.mask_spec import SameIds
from crisp_flex.passes.match import SdpaSite
from crisp_flex.passes.node_ops import size_expr
from crisp_flex.passes.placement import Placement
from crisp_flex.passes.size_nodes import size_node
from crisp_flex.passes.sparse_call import fake_tensor, size_of
from crisp_flex.passes.token_ids import TokenIds
from crisp_flex.routing import segments as segments_op  # noqa: F401  (registers the operator)
from crisp_flex.routing import window as window_ops  # noqa: F401  (registers the operators)


@dataclass(slots=True)
class MaskNodes:
    """Makes them for the sites of one graph; sites of one mask share what is alike.

    What is read from a tensor is read where the mask stood, so that no later change is seen: layer
    0 of a static cache counts its tokens before it attends.
    """

    graph: fx.Graph
    made: dict[tuple[object, ...], fx.Node] = field(default_factory=dict)

    def key_valid(self, site: SdpaSite, placed: Placement) -> fx.Node | None:
        """[B, Lkv] bool, in a buffer of its own; None where every key is there."""
        load = placed.padding
        if load is None:
            return None
        B = fake_tensor(site.query).shape[0]
        given = fake_tensor(load.source)
        start = load.kv_offset
        end = sympy.expand(start + placed.Lkv)
        # calls of different batch sizes may share a mask of one row
        alike = ("key_valid", site.attn_mask, str(B), start, end)

        def make() -> fx.Node:
            with self.graph.inserting_before(site.attn_mask):
                valid = self.graph.call_function(torch.ne, (load.source, 0))
            whole = torch_internals.Sizes(given).known(sympy.Eq(size_expr(given.shape[1]), end))
            if start != 0 or not whole:
                bounds = (size_node(self.graph, start), size_node(self.graph, end))
                valid = self.graph.call_function(torch.ops.aten.slice.Tensor, (valid, 1, *bounds))
            if not torch_internals.Sizes(given).known(
                sympy.Eq(size_expr(given.shape[0]), size_expr(B))
            ):
                size = B if isinstance(B, int) else size_of(self.graph, site.query, 0)
                valid = self.graph.call_function(torch.ops.aten.expand.default, (valid, [size, -1]))
            # a buffer of its own: the CPU and FLASH kernels do not take a pointwise value
            return self.graph.call_function(torch.ops.crisp_flex.realize.default, (valid,))

        return self._once(alike, make)

    def offset(self, site: SdpaSite, placed: Placement, key: fx.Node) -> int | fx.Node:
        """Position of query 0 among the keys: a number, or a [1] int32 tensor.

        Not a symbol: torch 2.11 and the CPU crash on an expression that mask_mod captures.

        Args:
            site: The call.
            placed: Its placement.
            key: [B, Hkv, Lkv, D], cut to placed.Lkv.
        """
        if placed.moved is not None:
            return self._moved(site, placed.moved, placed.moved_by)
        query = fake_tensor(site.query)
        Lq = size_expr(query.shape[2])
        gap = sympy.expand(placed.Lkv - Lq)
        if gap.is_Integer:
            return int(gap)
        if torch_internals.Sizes(query).hold(sympy.Eq(gap, 0)):
            return 0
        alike = ("offset", Lq, placed.Lkv, query.device)
        return self._once(
            alike,
            lambda: self.graph.call_function(
                torch.ops.crisp_flex.query_offset.default, (site.query, key)
            ),
        )

    def window(
        self,
        site: SdpaSite,
        placed: Placement,
        key: fx.Node,
        key_valid: fx.Node | None,
        q_offset: fx.Node | None,
        config: CrispConfig,
    ) -> list[fx.Node]:
        """The block lists of a site with a window, as `crisp_flex::window` gives them."""
        query = fake_tensor(site.query)
        sizes = (size_expr(query.shape[2]), placed.Lkv, query.device)
        read = (key_valid, q_offset, placed.window, config.tokens_per_block)
        arguments = (site.query, key, key_valid, placed.window, *config.tokens_per_block)
        routed = self._once(
            ("window", *sizes, *read),
            lambda: self.graph.call_function(
                torch.ops.crisp_flex.window.default, arguments, {"q_offset": q_offset}
            ),
        )
        return self._parts("window", routed)

    def ids(self, site: SdpaSite, placed: Placement, same: SameIds) -> tuple[fx.Node, fx.Node]:
        """[B, Lq] and [B, Lkv] int64: the ids that must be equal, read where the mask stood."""
        query = fake_tensor(site.query)
        B, Lq = (size_expr(query.shape[dim]) for dim in (0, 2))

        def make(tokens: sympy.Expr, expr: sympy.Expr) -> fx.Node:
            with self.graph.inserting_before(site.attn_mask):
                made = TokenIds(self.graph, B, tokens, query.device, dict(same.sources))
                return made.build(expr)

        q_ids, k_ids = (
            self._once(
                ("ids", site.attn_mask, B, tokens, expr), functools.partial(make, tokens, expr)
            )
            for tokens, expr in ((Lq, same.of_query), (placed.Lkv, same.of_key))
        )
        return q_ids, k_ids

    def segments(
        self,
        site: SdpaSite,
        placed: Placement,
        key: fx.Node,
        key_valid: fx.Node | None,
        ids: tuple[fx.Node, fx.Node],
        q_offset: fx.Node | None,
        config: CrispConfig,
    ) -> list[fx.Node]:
        """The block lists of a site with ids, as `crisp_flex::segments` gives them."""
        blocks = (placed.window, *config.tokens_per_block)
        routed = self._once(
            ("segments", key_valid, ids, q_offset, *blocks),
            lambda: self.graph.call_function(
                torch.ops.crisp_flex.segments.default,
                (site.query, key, key_valid, *ids, *blocks),
                {"q_offset": q_offset},
            ),
        )
        return self._parts("segments", routed)

    def _parts(self, name: str, routed: fx.Node) -> list[fx.Node]:
        return [
            self._once(
                (name, routed, i),
                lambda i=i: self.graph.call_function(operator.getitem, (routed, i)),  # type: ignore[misc]
            )
            for i in range(3)
        ]

    def _moved(self, site: SdpaSite, position: fx.Node, by: int) -> fx.Node:
        def make() -> fx.Node:
            with self.graph.inserting_before(site.attn_mask):
                at = self.graph.call_method("to", (position, torch.int32))
                if by:
                    at = self.graph.call_function(torch.add, (at, by))
                at = self.graph.call_method("reshape", (at, [1]))
                return self.graph.call_function(torch.ops.crisp_flex.realize.default, (at,))

        return self._once(("moved", site.attn_mask, position, by), make)

    def _once(self, alike: tuple[object, ...], make: Callable[[], fx.Node]) -> fx.Node:
        if alike not in self.made:
            self.made[alike] = make()
        return self.made[alike]
