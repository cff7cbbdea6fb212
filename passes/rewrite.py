"""Pass 3: replace one site by route -> flex_attention; the only file that edits a graph."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from crisp_flex import flex_hop, torch_internals
from crisp_flex.config import CrispConfig
from crisp_flex.passes.mask_spec import MaskSpec
from crisp_flex.passes.match import SdpaSite
from crisp_flex.passes.node_ops import tensor_of, value_of
from crisp_flex.routing.geometry import partial_slots
from crisp_flex.routing.ops import RouteResult  # noqa: F401  (registers the operators)
from crisp_flex.routing.params import RouteParams

_END = (1 << 63) - 1


@dataclass(slots=True)
class Rewriter:
    """Rewrites the sites of one graph; what sites share (masks, regions) is made once.

    Before:
        %attn = scaled_dot_product_attention(%q, %k_repeated, %v_repeated, attn_mask=%mask)
    After (CUDA):
        %key_valid = ne(%attention_mask, 0)                      only if the mask has a padding load
        %routed = crisp_flex.route(%q, %k, %key_valid, scale, 128, 128, "hybrid", ...)
        %flex = flex_attention(%q, %k, %v, score_mod, (Lq, Lkv, %routed[0], ...), scale, ...)
        %attn = %flex[0]
    After (CPU): q, k and v go through `crisp_flex.realize` (Inductor's C++ template takes no views)
    and the last two lines stand in a region that all alike sites call: compiled once, not once a
    layer.
    """

    gm: fx.GraphModule
    key_valid: dict[tuple[fx.Node, str], fx.Node] = field(default_factory=dict)
    regions: dict[tuple[Any, ...], str] = field(default_factory=dict)

    def rewrite(
        self,
        site: SdpaSite,
        key: fx.Node,
        value: fx.Node,
        mask: MaskSpec | None,
        config: CrispConfig,
    ) -> str:
        """Replace an eligible site, key and value being the un-repeated ones.

        Returns:
            The kernel it will run on: "FLASH", "TRITON" or "CPU".
        """
        query, graph = site.query, self.gm.graph
        q, k, v = (_tensor(node) for node in (query, key, value))
        D, on_cpu = int(q.shape[3]), q.device.type == "cpu"
        kernel = flex_hop.choose_kernel(
            q.device,
            q.dtype,
            D=D,
            Dv=int(v.shape[3]),
            block_size=config.block_size,
            backend=config.backend,
            captures=mask is not None and bool(mask.padding),
        )
        scale = self._scale(site, D)
        options = flex_hop.kernel_options(
            kernel,
            device=q.device,
            dtype=q.dtype,
            D=D,
            divisible=_divisible(q.shape[2], config.block_size),
            user=config.kernel_options,
        )
        key_valid = self._key_valid(site, mask) if mask is not None and mask.padding else None
        captured = [] if key_valid is None else [key_valid]
        params = RouteParams.from_config(config, D=D, scale=scale)
        with graph.inserting_before(site.node):
            if on_cpu:
                query, key, value = (
                    graph.call_function(torch.ops.crisp_flex.realize.default, (x,))
                    for x in (query, key, value)
                )
            routed = graph.call_function(
                torch.ops.crisp_flex.route.default, (query, key, key_valid, *params.as_args())
            )
            counts, buffer, full_counts = (
                graph.call_function(operator.getitem, (routed, i)) for i in range(3)
            )
            operands = [query, key, value, counts, buffer, full_counts, *captured]
            if on_cpu and flex_hop.sizes_fit_region([q, k, v]):
                region = self._region(site, operands, config, scale, options)
                out = flex_hop.region_call(graph, region, operands)
            else:
                lengths = _lengths(graph, query)
                out = _attend(self.gm, operands, lengths, config, scale, options, kernel)
            out = _restore_layout(graph, out, q, site, on_cpu)
        out.meta = dict(site.node.meta)
        site.node.replace_all_uses_with(out)
        graph.erase_node(site.node)
        return kernel

    def _scale(self, site: SdpaSite, D: int) -> float:
        if site.scale is None:
            return 1.0 / math.sqrt(D)
        scale = value_of(site.scale)
        if not isinstance(scale, (int, float, torch.SymFloat)):
            raise ValueError(
                f"the scale of {site.node.name} is {scale!r}: check() lets none through"
            )
        return torch_internals.specialise_float(scale)

    def _key_valid(self, site: SdpaSite, mask: MaskSpec) -> fx.Node:
        """[B, Lkv] bool, read where the mask was built: no later change of its source is seen."""
        at, graph = site.attn_mask, self.gm.graph
        if at is None:
            raise ValueError("a site with a lifted mask has an attn_mask")
        source = mask.padding[0].source
        q, given = _tensor(site.query), _tensor(source)
        B, L = q.shape[0], q.shape[2]
        alike = (at, str(B))  # calls of different batch sizes may share a mask of one row
        if alike in self.key_valid:
            return self.key_valid[alike]
        with graph.inserting_before(at):
            valid = graph.call_function(torch.ne, (source, 0))
        with graph.inserting_before(site.node):
            if not statically_known_true(given.shape[1] == L):
                end = _lengths(graph, site.query)[1]
                valid = graph.call_function(torch.ops.aten.slice.Tensor, (valid, 1, 0, end))
            if not statically_known_true(given.shape[0] == B):
                size = B if isinstance(B, int) else _size(graph, site.query, 0)
                valid = graph.call_function(torch.ops.aten.expand.default, (valid, [size, -1]))
            # a buffer of its own: the CPU and FLASH kernels do not take a pointwise value
            valid = graph.call_function(torch.ops.crisp_flex.realize.default, (valid,))
        self.key_valid[alike] = valid
        return valid

    def _region(
        self,
        site: SdpaSite,
        operands: list[fx.Node],
        config: CrispConfig,
        scale: float,
        options: dict[str, Any],
    ) -> str:
        """Name of the submodule that attends over these operands, shared by alike sites."""
        tensors = [_tensor(node) for node in (site.query, site.key, site.value)]
        shapes = tuple(str((tuple(t.shape), t.dtype)) for t in tensors)
        alike = (shapes, len(operands), config.block_size, scale, str(sorted(options.items())))
        if alike not in self.regions:
            graph = fx.Graph()
            body = fx.GraphModule(torch.nn.Module(), graph)
            inputs = [graph.placeholder(f"operand_{i}") for i in range(len(operands))]
            lengths = _lengths(graph, inputs[0])
            out = _attend(body, inputs, lengths, config, scale, options, "CPU")
            graph.output((out,))
            body.recompile()
            self.regions[alike] = flex_hop.add_submodule(self.gm, "crisp_flex_region", body)
        return self.regions[alike]


def _attend(
    gm: fx.GraphModule,
    operands: list[fx.Node],
    lengths: tuple[int | fx.Node, int | fx.Node],
    config: CrispConfig,
    scale: float,
    options: dict[str, Any],
    kernel: str,
) -> fx.Node:
    query, key, value, counts, buffer, full_counts, *captured = operands
    graph = gm.graph
    partial = partial_slots(*config.block_size, 0, 0, False)  # Lq == Lkv
    P: int | fx.Node = partial
    end: int | fx.Node = -partial
    if captured:  # both lists are Nkv wide, so each takes half of the buffer
        width = _size(graph, buffer, 3)
        P = graph.call_function(operator.floordiv, (width, 2))
        end = P
    kv_indices = graph.call_function(torch.ops.aten.slice.Tensor, (buffer, 3, 0, end))
    full_kv_indices = graph.call_function(torch.ops.aten.slice.Tensor, (buffer, 3, P, _END))
    if kernel == "CPU":
        # the C++ template takes two views of one buffer for the same argument
        kv_indices, full_kv_indices = (
            graph.call_function(torch.ops.crisp_flex.realize.default, (x,))
            for x in (kv_indices, full_kv_indices)
        )
    lists = {
        "kv_num_blocks": counts,
        "kv_indices": kv_indices,
        "full_kv_num_blocks": full_counts,
        "full_kv_indices": full_kv_indices,
    }
    return flex_hop.flex_call(
        gm,
        query=query,
        key=key,
        value=value,
        lists=lists,
        lengths=lengths,
        block_size=config.block_size,
        mask_mod=flex_hop.causal_padded_mod if captured else flex_hop.causal_mod,
        captured=captured,
        scale=scale,
        options=options,
    )


def _restore_layout(
    graph: fx.Graph, out: fx.Node, q: torch.Tensor, site: SdpaSite, on_cpu: bool
) -> fx.Node:
    """out with the dim order that SDPA's result has: a `.view` behind the call may rely on it.

    flex_attention lays its result out as query is, which is contiguous after `realize`.
    """
    want = _is_token_major(_tensor(site.node))
    if want == (not on_cpu and _is_token_major(q)):
        return out
    if not want:
        return graph.call_method("contiguous", (out,))
    swapped = graph.call_method("transpose", (out, 1, 2))
    swapped = graph.call_method("contiguous", (swapped,))
    return graph.call_method("transpose", (swapped, 1, 2))


def _is_token_major(tensor: torch.Tensor) -> bool:
    """Whether a [B, H, L, D] tensor lies in memory as [B, L, H, D]."""
    return tensor.shape[1] != 1 and statically_known_true(tensor.stride(1) == tensor.shape[3])


def _tensor(node: fx.Node) -> torch.Tensor:
    tensor = tensor_of(node)
    if tensor is None:
        raise ValueError(f"{node.name} has no shape: check() lets no such site through")
    return tensor


def _lengths(graph: fx.Graph, query: fx.Node) -> tuple[int | fx.Node, int | fx.Node]:
    """(Lq, Lkv) of a square site: numbers where static, else one node for both."""
    given = tensor_of(query)
    if given is not None and isinstance(given.shape[2], int):
        return given.shape[2], given.shape[2]
    length = _size(graph, query, 2)
    return length, length


def _size(graph: fx.Graph, tensor: fx.Node, dim: int) -> fx.Node:
    return graph.call_function(torch.ops.aten.sym_size.int, (tensor, dim))


def _divisible(Lq: int | torch.SymInt, block_size: tuple[int, int]) -> bool:
    return isinstance(Lq, int) and Lq % max(128, *block_size) == 0
