"""Ids of tokens as nodes: a document's or chunk's number, an expression of (b, q) or of (b, k)."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import sympy
import torch
from sympy.core.function import AppliedUndef
from torch import fx

from crisp_flex.passes.mask_formula import INDICES, B
from crisp_flex.passes.size_nodes import can_build, size_node


def can_build_ids(graph: fx.Graph, ids: sympy.Expr, sources: Mapping[str, fx.Node]) -> bool:
    """Whether `TokenIds` can compute ids from the inputs of the graph and the given tensors."""
    if ids.is_Integer or ids in INDICES or str(ids) in sources:
        return True
    if ids.is_Symbol:
        return can_build(graph, ids)
    if isinstance(ids, sympy.floor):
        parts = ids.args[0].as_numer_denom()
    elif isinstance(ids, (sympy.Add, sympy.Mul)) or (
        isinstance(ids, AppliedUndef) and str(ids.func) in sources
    ):
        parts = ids.args
    else:
        return False
    return all(can_build_ids(graph, part, sources) for part in parts)


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Computes ids of B sequences of L tokens, at the graph's insertion point.

    Args:
        graph: Where the nodes go.
        batch: B, as nodes may compute it.
        tokens: L, likewise.
        device: Of the sources and of the result.
        sources: The tensor behind each symbol and function of the expression, by name.
    """

    graph: fx.Graph
    batch: sympy.Expr
    tokens: sympy.Expr
    device: torch.device
    sources: Mapping[str, fx.Node]

    def build(self, ids: sympy.Expr) -> fx.Node:
        """[B, L] int64, in a buffer of its own; `can_build_ids` allows ids."""
        sizes = [size_node(self.graph, size) for size in (self.batch, self.tokens)]
        wide = self.graph.call_method("expand", (self._node(ids), *sizes))
        whole = self.graph.call_method("contiguous", (wide,))
        return self.graph.call_function(torch.ops.crisp_flex.realize.default, (whole,))

    def _node(self, ids: sympy.Expr) -> Any:  # noqa: ANN401
        """A number, a size, or a tensor that broadcasts to [B, L]."""
        if ids in INDICES:  # (b, q) or (b, k): one index runs over tokens
            length = size_node(self.graph, self.batch if ids == B else self.tokens)
            kind: dict[str, Any] = {"device": self.device, "dtype": torch.int64}
            every = self.graph.call_function(torch.arange, (length,), kind)
            return self.graph.call_method("unsqueeze", (every, 1 if ids == B else 0))
        if str(ids) in self.sources:  # 0-dim
            return self._int64(self.sources[str(ids)])
        if isinstance(ids, AppliedUndef):
            at = tuple(self._node(part) for part in ids.args)
            source = self.sources[str(ids.func)]
            return self._int64(self.graph.call_function(operator.getitem, (source, at)))
        if isinstance(ids, sympy.floor):
            parts = tuple(self._node(part) for part in ids.args[0].as_numer_denom())
            return self.graph.call_function(operator.floordiv, parts)
        if isinstance(ids, (sympy.Add, sympy.Mul)):
            fold = operator.add if isinstance(ids, sympy.Add) else operator.mul
            folded = [self._node(part) for part in ids.args]
            return reduce(lambda left, right: self.graph.call_function(fold, (left, right)), folded)
        return size_node(self.graph, ids)

    def _int64(self, tensor: fx.Node) -> fx.Node:
        return self.graph.call_method("to", (tensor, torch.int64))
