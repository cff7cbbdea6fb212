"""Sizes as nodes: a sympy expression over a graph's shape symbols becomes calls that compute it."""

from __future__ import annotations

import operator
from functools import reduce

import sympy
import torch
from torch import fx

from crisp_flex import torch_internals
from crisp_flex.passes.node_ops import tensor_of, value_of

_FOLDS = {
    "Add": operator.add,
    "Mul": operator.mul,
    "Max": torch.sym_max,
    "Min": torch.sym_min,
}


def can_build(graph: fx.Graph, expr: sympy.Expr) -> bool:
    """Whether `size_node` can compute expr from the inputs of the graph."""
    if expr.is_Integer:
        return True
    if expr.is_Symbol:
        return _holder(graph, expr) is not None
    return type(expr).__name__ in _FOLDS and all(can_build(graph, part) for part in expr.args)


def size_node(graph: fx.Graph, expr: sympy.Expr) -> int | fx.Node:
    """expr as a number, or as nodes inserted at the graph's insertion point.

    Args:
        graph: The graph whose inputs have the symbols.
        expr: Integers and symbols under +, *, Max and Min, as `can_build` allows.

    Raises:
        ValueError: expr has another form, or a symbol that no input has.
    """
    if expr.is_Integer:
        return int(expr)
    if expr.is_Symbol:
        held = _holder(graph, expr)
        if held is None:
            raise ValueError(f"no input of the graph has the size {expr}")
        node, dim = held
        if dim is None:
            return node
        return graph.call_function(torch.ops.aten.sym_size.int, (node, dim))
    fold = _FOLDS.get(type(expr).__name__)
    if fold is None:
        raise ValueError(f"no node computes the size {expr}")
    parts = [size_node(graph, part) for part in expr.args]
    return reduce(lambda left, right: graph.call_function(fold, (left, right)), parts)


def _holder(graph: fx.Graph, symbol: sympy.Symbol) -> tuple[fx.Node, int | None] | None:
    """The input that is symbol, or that has it as the size of a dimension."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    for node in inputs:
        if symbol in torch_internals.symbols_of(value_of(node)):
            return node, None
    for node in inputs:
        tensor = tensor_of(node)
        for dim, size in enumerate(tensor.shape if tensor is not None else ()):
            if symbol in torch_internals.symbols_of(size):
                return node, dim
    return None
