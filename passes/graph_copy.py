"""A copy of a graph, for who must see it before and after the passes."""

from __future__ import annotations

from torch import fx

from crisp_flex import torch_internals


def copy_with_meta(graph: fx.Graph) -> fx.Graph:
    """The same nodes with the same meta; tensors and submodules are shared with the original."""
    copied, made = fx.Graph(), dict[fx.Node, fx.Node]()
    copied.output(copied.graph_copy(graph, made))
    for node in graph.find_nodes(op="placeholder"):
        torch_internals.copy_source(node, made[node])
    return copied
