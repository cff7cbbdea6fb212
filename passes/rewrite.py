"""Pass 3: replace one site by route -> flex_attention, with the nodes that its helpers make."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from crisp_flex import flex_hop, head_groups, last_rows
from crisp_flex.config import CrispConfig
from crisp_flex.head_groups import HeadGroup
from crisp_flex.passes.mask_nodes import MaskNodes
from crisp_flex.passes.match import SdpaSite
from crisp_flex.passes.placement import Placement
from crisp_flex.passes.plan import Plan, plan_call
from crisp_flex.passes.selection import selection  # its import registers the operators, too
from crisp_flex.passes.size_nodes import size_node
from crisp_flex.passes.sparse_call import (
    KvParts,
    empty_result,
    fake_tensor,
    heads_of,
    restore_layout,
    share_with_sinks,
    size_of,
)
from crisp_flex.uncovered import UncoveredGuard


@dataclass(frozen=True, slots=True)
class Rewritten:
    """What a site became: kernel ("FLASH", "TRITON" or "CPU"), policy, number of head groups.

    The policy is "window" where all blocks of a sliding window are kept, "segments" where all of a
    query's document or chunk are; last_blocks_apart query blocks at the end go by
    `write_last_rows`; selection is "kernels" (Triton), "reference" (plain PyTorch) or "" where
    nothing is selected.
    """

    kernel: str
    policy: str
    head_groups: int
    last_blocks_apart: int = 0
    selection: str = ""


@dataclass(slots=True)
class Rewriter:
    """Rewrites the sites of one graph; what sites share (masks, regions) is made once.

    Before:
        %attn = scaled_dot_product_attention(%q, %k_repeated, %v_repeated, attn_mask=%mask)
    After (CUDA):
        %key_valid = ne(%attention_mask, 0)                      only if the mask has a padding load
        %k, %v = slice(%cache_k, 2, 0, Lkv), ...                 only if the cache is longer
        %routed = crisp_flex.route(%q, %k, %key_valid, scale, 128, 128, "hybrid", ...)
        %flex = flex_attention(%q, %k, %v, score_mod, (Lq, Lkv, %routed[0], ...), scale, ...)
        %attn = %flex[0]
    After (CUDA, a long prompt): the same once a head group, over slices of the heads
        %attn = empty_permuted(...)
        %routed = crisp_flex.route_after(%attn, %q[:, 0:8], %k[:, 0:2], ...)
        %flex = flex_attention(%q[:, 0:8], %k[:, 0:2], %v[:, 0:2], ...)
        crisp_flex.write_heads(%attn, %flex[0], 0)               then heads 8 to 16, and so on
    and then, where all queries of the last blocks see all keys (`last_rows`),
        crisp_flex.write_last_rows(%attn, %q, %k, %v, scale, 128, 1)
    After (CPU): q, k and v go through `crisp_flex.realize` (Inductor's C++ template takes no views)
    and flex_attention stands in a region that all alike sites call: compiled once, not once a
    layer.
    """

    gm: fx.GraphModule
    share_regions: bool = True
    regions: dict[tuple[Any, ...], str] = field(default_factory=dict)
    masks: MaskNodes = field(init=False)

    def __post_init__(self) -> None:
        """One set of mask nodes for the graph."""
        self.masks = MaskNodes(self.gm.graph)

    def rewrite(
        self,
        site: SdpaSite,
        key: fx.Node,
        value: fx.Node,
        placed: Placement,
        config: CrispConfig,
    ) -> Rewritten:
        """Replace an eligible site, key and value being the un-repeated ones."""
        query, graph = site.query, self.gm.graph
        q, k, v = (fake_tensor(node) for node in (query, key, value))
        with graph.inserting_before(site.node):
            if placed.cut:
                end = size_node(graph, placed.Lkv)
                key, value = (
                    graph.call_function(torch.ops.aten.slice.Tensor, (x, 2, 0, end))
                    for x in (key, value)
                )
            call = plan_call(self.masks, site, key, (q, k, v), placed, config)
        apart = (
            site.is_plain
            and call.lists is None
            and call.key_valid is None
            and call.q_offset is None
            and last_rows.are_apart(q, k, v, config)
        )
        if apart:
            call = replace(call, params=replace(call.params, dense_last_blocks=0))
        where = site.module_path or f"attention call {site.index} ({site.node.name})"
        guard = UncoveredGuard.of(config, where, site=site.module_path or site.index)
        if guard is not None:  # it looks at what is left out, so nothing may be made dense first
            call = replace(call, params=replace(call.params, max_uncovered=1.0))
        groups = [HeadGroup(0, int(q.shape[1]), 0, int(k.shape[1]))]
        if call.lists is None:
            count = head_groups.count_groups_of(
                q,
                k,
                v,
                Lkv=int(placed.Lkv) if placed.Lkv.is_Integer else k.shape[2],
                block_size=config.tokens_per_block,
                has_key_valid=call.key_valid is not None,
            )
            groups = head_groups.split_heads(count, Hq=int(q.shape[1]), Hkv=int(k.shape[1]))
        like = fake_tensor(site.node)
        with graph.inserting_before(site.node):
            if len(groups) == 1:
                out = self._attend(call, groups[0], query, key, value, site=site.index, guard=guard)
                out = restore_layout(graph, out, q, like)
            else:
                out = empty_result(graph, query, like)
                parts = KvParts(graph, key, value)
                for group in groups:
                    part = heads_of(graph, query, group.q_start, group.q_end)
                    piece = self._attend(
                        call, group, part, *parts.of(group), site=site.index, guard=guard, done=out
                    )
                    graph.call_function(
                        torch.ops.crisp_flex.write_heads.default, (out, piece, group.q_start)
                    )
            if apart:
                numbers = (call.params.scale, call.params.block_q, config.dense_last_blocks)
                graph.call_function(
                    torch.ops.crisp_flex.write_last_rows.default,
                    (out, query, key, value, *numbers),
                )
        out.meta = dict(site.node.meta)
        site.node.replace_all_uses_with(out)
        graph.erase_node(site.node)
        exact = "window" if placed.same is None else "segments"
        policy = config.policy if call.lists is None else exact
        blocks = config.dense_last_blocks if apart else 0
        chosen_by = selection(q, k, call.params, listed=call.lists is not None)
        return Rewritten(call.kernel, policy, len(groups), blocks, chosen_by)

    def _attend(
        self,
        call: Plan,
        group: HeadGroup,
        query: fx.Node,
        key: fx.Node,
        value: fx.Node,
        *,
        site: int,
        guard: UncoveredGuard | None,
        done: fx.Node | None = None,
    ) -> fx.Node:
        """route and flex_attention over one group's heads, once all writes to done are over."""
        graph = self.gm.graph
        if call.kernel == "CPU":
            query, key, value = (
                graph.call_function(torch.ops.crisp_flex.realize.default, (x,))
                for x in (query, key, value)
            )
        lists = call.lists
        if lists is None:
            inputs = (query, key, call.key_valid, *call.params.as_args())
            moved: dict[str, Any] = {"site": site}
            if call.q_offset is not None:
                moved["q_offset"] = call.q_offset
            if call.params.reads_values:
                moved["value"] = value
            route = torch.ops.crisp_flex.route.default
            if done is not None:
                route, inputs = torch.ops.crisp_flex.route_after.default, (done, *inputs)
            routed = graph.call_function(route, inputs, moved)
            lists = [graph.call_function(operator.getitem, (routed, i)) for i in range(3)]
            if guard is not None:
                stats = graph.call_function(operator.getitem, (routed, 3))
                lists[0] = graph.call_function(
                    torch.ops.crisp_flex.check_uncovered.default,
                    (lists[0], stats, *guard.as_args()),
                )
        operands = [query, key, value, *lists, *call.captured]
        plain = call.sinks is None
        if call.kernel == "CPU" and self.share_regions and call.shapes is not None and plain:
            return flex_hop.region_call(graph, self._region(call, group, operands), operands)
        attended = call.attend(self.gm, operands, call.lengths)
        out = graph.call_function(operator.getitem, (attended, 0))
        if call.sinks is None:
            return out
        sinks = graph.call_function(
            torch.ops.aten.slice.Tensor, (call.sinks, 0, group.q_start, group.q_end)
        )
        return share_with_sinks(graph, out, attended, sinks)

    def _region(self, call: Plan, group: HeadGroup, operands: list[fx.Node]) -> str:
        """Name of the submodule that attends over these operands, shared by alike calls."""
        heads = (group.q_end - group.q_start, group.kv_end - group.kv_start)
        numbers = (call.params.block_q, call.params.block_kv, call.params.scale, call.partial)
        how = (call.mask_mod, len(operands), *numbers, str(sorted(call.options.items())))
        alike = (call.shapes, heads, call.softcap, *how)
        if alike not in self.regions:
            graph = fx.Graph()
            body = fx.GraphModule(torch.nn.Module(), graph)
            inputs = [graph.placeholder(f"operand_{i}") for i in range(len(operands))]
            Lq = size_of(graph, inputs[0], 2)
            square = call.lengths[0] == call.lengths[1]
            lengths = (Lq, Lq if square else size_of(graph, inputs[1], 2))
            attended = call.attend(body, inputs, lengths)
            graph.output((graph.call_function(operator.getitem, (attended, 0)),))
            body.recompile()
            self.regions[alike] = flex_hop.add_submodule(self.gm, "crisp_flex_region", body)
        return self.regions[alike]
