"""The nodes of one sparse attention call: its heads, its block lists, flex, its output's layout."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from crisp_flex import flex_hop
from crisp_flex.head_groups import HeadGroup
from crisp_flex.passes.node_ops import tensor_of

_END = (1 << 63) - 1


def attend(
    gm: fx.GraphModule,
    operands: Sequence[fx.Node],
    lengths: tuple[int | fx.Node, int | fx.Node],
    block_size: tuple[int, int],
    scale: float,
    options: dict[str, Any],
    kernel: str,
    mask_mod: Callable[..., Any],
    partial: int | None,
    softcap: float | None = None,
) -> fx.Node:
    """Insert flex_attention over listed blocks at gm.graph's insertion point.

    Args:
        gm: Graph to insert into.
        operands: query, key, value, then kv_num_blocks, kv_buffer and full_kv_num_blocks as
            `crisp_flex::route` gives them, then the tensors that mask_mod captures.
        lengths: (Lq, Lkv), a node where symbolic.
        block_size: (query, key) tokens.
        scale: Factor on the logits.
        options: From `flex_hop.kernel_options`.
        kernel: "FLASH", "TRITON" or "CPU".
        mask_mod: From `mask_mods.mask_mod`.
        partial: Slots of kv_buffer in front of the full blocks; None for half of them.
        softcap: Cap on the logits.

    Returns:
        The operator's node: a tuple of the result, the log2-sum-exp of each row, and more.
    """
    query, key, value, counts, buffer, full_counts, *captured = operands
    graph = gm.graph
    P: int | fx.Node
    end: int | fx.Node
    if partial is None:
        P = end = graph.call_function(operator.floordiv, (size_of(graph, buffer, 3), 2))
    else:
        P, end = partial, -partial
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
        block_size=block_size,
        mask_mod=mask_mod,
        captured=captured,
        scale=scale,
        options=options,
        softcap=softcap,
    )


def share_with_sinks(graph: fx.Graph, out: fx.Node, attended: fx.Node, sinks: fx.Node) -> fx.Node:
    """out with the sinks' part of the mass taken off: exact, since a sink has no value.

    A softmax over keys and sink is the softmax over the keys, times
    exp(lse) / (exp(lse) + exp(sink)) = sigmoid(lse - sink).

    Args:
        graph: Where to insert.
        out: [B, H, Lq, Dv], the result without sinks.
        attended: The operator's tuple; it has the log-sum-exp in base 2.
        sinks: [H], in natural logits.
    """
    lse = graph.call_function(operator.getitem, (attended, 1))
    natural = graph.call_function(operator.mul, (lse, math.log(2)))
    logits = graph.call_method("to", (sinks, torch.float32))
    logits = graph.call_method("view", (logits, 1, -1, 1))
    share = graph.call_function(torch.sigmoid, (graph.call_function(torch.sub, (natural, logits)),))
    share = graph.call_method("unsqueeze", (share, -1))
    scaled = graph.call_function(operator.mul, (out, share))
    return graph.call_method("type_as", (scaled, out))


def restore_layout(graph: fx.Graph, out: fx.Node, q: torch.Tensor, like: torch.Tensor) -> fx.Node:
    """out with the dim order that SDPA's result `like` has: a `.view` behind it may rely on it.

    flex_attention lays its result out as query is, which on the CPU is contiguous (`realize`).
    """
    want = _is_token_major(like)
    if want == (q.device.type != "cpu" and _is_token_major(q)):
        return out
    if not want:
        return graph.call_method("contiguous", (out,))
    swapped = graph.call_method("transpose", (out, 1, 2))
    swapped = graph.call_method("contiguous", (swapped,))
    return graph.call_method("transpose", (swapped, 1, 2))


def empty_result(graph: fx.Graph, query: fx.Node, like: torch.Tensor) -> fx.Node:
    """An empty tensor with the shape and the dim order that SDPA's result `like` has."""
    B, Hq, L, Dv = like.shape
    sizes: list[int | fx.Node] = [
        B if isinstance(B, int) else size_of(graph, query, 0),
        int(Hq),
        L if isinstance(L, int) else size_of(graph, query, 2),
        int(Dv),
    ]
    order = [0, 2, 1, 3] if _is_token_major(like) else [0, 1, 2, 3]
    kind: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
    return graph.call_function(torch.ops.aten.empty_permuted.default, (sizes, order), kind)


def _is_token_major(tensor: torch.Tensor) -> bool:
    """Whether a [B, H, L, D] tensor lies in memory as [B, L, H, D]."""
    return tensor.shape[1] != 1 and statically_known_true(tensor.stride(1) == tensor.shape[3])


class KvParts:
    """Key and value heads of the groups, cut once where several groups share a key head."""

    def __init__(self, graph: fx.Graph, key: fx.Node, value: fx.Node) -> None:
        self._graph, self._whole = graph, (key, value)
        self._cut: dict[tuple[int, int], list[fx.Node]] = {}

    def of(self, group: HeadGroup) -> list[fx.Node]:
        """Key and value of one group."""
        at = (group.kv_start, group.kv_end)
        if at not in self._cut:
            self._cut[at] = [heads_of(self._graph, x, *at) for x in self._whole]
        return self._cut[at]


def heads_of(graph: fx.Graph, tensor: fx.Node, start: int, end: int) -> fx.Node:
    """Heads [start, end) of a [B, H, L, D] tensor, a view."""
    return graph.call_function(torch.ops.aten.slice.Tensor, (tensor, 1, start, end))


def fake_tensor(node: fx.Node) -> torch.Tensor:
    """The fake tensor of a node that `check` has let through."""
    tensor = tensor_of(node)
    if tensor is None:
        raise ValueError(f"{node.name} has no shape: check() lets no such site through")
    return tensor


def size_of(graph: fx.Graph, tensor: fx.Node, dim: int) -> fx.Node:
    """A node for one size of a tensor."""
    return graph.call_function(torch.ops.aten.sym_size.int, (tensor, dim))
