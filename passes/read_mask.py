"""Read a lifted formula, statement by statement: causal, window, padding, documents, or other."""

from __future__ import annotations

from dataclasses import replace

import sympy
import torch
from sympy.core.function import AppliedUndef
from torch import fx

from crisp_flex.passes.lift_element import ElementLifter
from crisp_flex.passes.mask_formula import (
    INDICES,
    B,
    Compare,
    Conjunct,
    Element,
    Formula,
    K,
    Load,
    Never,
    Q,
    Unread,
)
from crisp_flex.passes.mask_spec import MaskSpec, PaddingLoad, SameIds
from crisp_flex.passes.node_ops import shape_of, size_expr, value_of
from crisp_flex.passes.packed_positions import by_index


def read_mask(formula: Formula, mask: fx.Node, lifter: ElementLifter) -> MaskSpec:
    """The MaskSpec of a formula lifted from mask.

    Args:
        formula: Statements over the coordinates of mask, right-aligned to (b, h, q, k).
        mask: Where the formula comes from; its sizes bound the coordinates.
        lifter: That lifted it; it knows the tensor behind each symbol and function.
    """
    return _Reader(mask, lifter).read(formula)


class _Reader:
    """Sorts the statements of one formula; those of one kind are settled together at the end."""

    def __init__(self, mask: fx.Node, lifter: ElementLifter) -> None:
        self.graph = mask.graph
        self.lifter = lifter
        self.sources = lifter.sources
        sizes = shape_of(mask)
        self.batch = sizes[-4] if len(sizes) == 4 else sympy.Integer(1)
        self.largest = {Q: sizes[-2] - 1, K: sizes[-1] - 1}
        # found statements: (bound, text); k <= q + bound, k >= q + bound, k < bound
        self.upper: list[tuple[sympy.Expr, str]] = []
        self.lower: list[tuple[sympy.Expr, str]] = []
        self.limits: list[tuple[sympy.Expr, str]] = []
        self.padding: list[PaddingLoad] = []
        self.same: list[SameIds] = []
        self.by_position = False
        self.other: list[str] = []

    def read(self, formula: Formula) -> MaskSpec:
        unread = [conjunct for conjunct in formula if not self._read(conjunct)]
        for conjunct in unread:
            if not self._read_by_index(conjunct):
                self._read_as_padding(conjunct)
        return self._settled()

    def _read(self, conjunct: Conjunct) -> bool:
        """Whether the statement was of a known form."""
        match conjunct:
            case Compare("<=", left, right):
                return self._read_order(sympy.expand(left - right), left, right)
            case Compare("==", left, right):
                return self._read_equal(left, right)
            case Load(element):
                return self._read_load(element)
        return False

    def _read_order(self, gap: sympy.Expr, left: sympy.Expr, right: sympy.Expr) -> bool:
        """The statement gap <= 0, gap being left - right."""
        in_q, in_k = gap.coeff(Q), gap.coeff(K)
        rest = sympy.expand(gap - in_q * Q - in_k * K)
        if _loads(gap) or rest.free_symbols & set(INDICES):
            return self._read_by_position(left, right)
        if self._always(in_q, in_k, rest):
            return True
        text = f"{left} <= {right}"
        if (in_q, in_k) == (-1, 1):
            self.upper.append((-rest, text))
        elif (in_q, in_k) == (1, -1):
            self.lower.append((rest, text))
        elif (in_q, in_k) == (0, 1):
            self.limits.append((1 - rest, text))
        else:
            return False
        return True

    def _always(self, in_q: sympy.Expr, in_k: sympy.Expr, rest: sympy.Expr) -> bool:
        """Whether in_q * q + in_k * k + rest <= 0 for every element of the mask."""
        most = rest
        for factor, index in ((in_q, Q), (in_k, K)):
            if not factor.is_number:
                return False
            most += sympy.Max(factor, 0) * self.largest[index]
        return bool(sympy.expand(most).is_nonpositive)

    def _read_by_position(self, left: sympy.Expr, right: sympy.Expr) -> bool:
        """k <= p[..., q]: the position of the query is only known when the graph runs."""
        loads = _loads(right)
        by_position = (
            sympy.expand(left - K).is_Integer
            and len(loads) == 1
            and all(load.has(Q) and not load.has(K) for load in loads)
            and sympy.expand(right - sum(loads)).is_Integer
        )
        self.by_position |= by_position
        return by_position

    def _read_by_index(self, conjunct: Conjunct) -> bool:
        """An order of positions that equal ids turn into one of indices: packed documents."""
        if isinstance(conjunct, Compare) and conjunct.op == "<=":
            for same in self.same:
                moved = by_index(conjunct, same, self.lifter)
                if moved is not None and self._read(moved):
                    return True
        return False

    def _read_equal(self, left: sympy.Expr, right: sympy.Expr) -> bool:
        """An id of the query equals an id of the key: of a chunk of positions, of a document."""
        for of_query, of_key in ((left, right), (right, left)):
            indices = (side.free_symbols & set(INDICES) for side in (of_query, of_key))
            if [found - {B} for found in indices] == [{Q}, {K}]:
                same = SameIds(of_query, of_key, self._sources_of(of_query, of_key))
                if same not in self.same:
                    self.same.append(same)
                return True
        return False

    def _sources_of(self, *exprs: sympy.Expr) -> tuple[tuple[str, fx.Node], ...]:
        names = {str(s) for expr in exprs for s in expr.free_symbols}
        names |= {str(load.func) for expr in exprs for load in _loads(expr)}
        return tuple((name, self.sources[name]) for name in sorted(names & self.sources.keys()))

    def _read_load(self, element: Element) -> bool:
        """source[b, k + offset], or source[0, k + offset] of a source with one row."""
        if len(element.coords) != 2:
            return False
        row, column = element.coords
        rows = shape_of(element.node)[0]
        offset = sympy.expand(column - K)
        batch = self.batch if row == B else sympy.Integer(1)
        # separate inputs have separate symbols for one batch size: `check` compares them
        if row not in (B, 0) or (rows != batch and (rows.is_Integer or row != B)):
            return False
        if _loads(offset) or offset.free_symbols & set(INDICES) or not offset.is_nonnegative:
            return False
        load = PaddingLoad(element.node, offset, per_batch=row == B)
        if load not in self.padding:
            self.padding.append(load)
        return True

    def _read_as_padding(self, conjunct: Conjunct) -> None:
        """A statement of another form may still hold in a 2-D tensor of the graph, as a whole."""
        origin = None if isinstance(conjunct, (Load, Never)) else conjunct.origin
        if isinstance(conjunct, Compare) and conjunct.op == "!=" and conjunct.right == 0:
            origin = self._element(conjunct.left) or origin
        if origin is None or not self._read_load(origin):
            self.other.append(_text(conjunct))

    def _element(self, load: sympy.Expr) -> Element | None:
        """The element behind an integer load."""
        node = self.sources.get(str(load.func))
        return None if node is None else Element(node, load.args)

    def _settled(self) -> MaskSpec:
        """One bound of each kind, or none and the statements in other."""
        spec = MaskSpec(
            padding=tuple(self.padding),
            same=tuple(self.same),
            by_position=self.by_position,
        )
        upper, lower, limits = (
            self._single(found) for found in (self.upper, self.lower, self.limits)
        )
        if upper is not None:
            spec = replace(spec, causal=True, q_offset=upper)
        if lower is not None:  # k >= q + lower, which is k > q + q_offset - window
            spec = replace(spec, window=sympy.expand(spec.q_offset - lower + 1))
        return replace(
            spec,
            kv_limit=limits,
            other=tuple(self.other),
            symbols=self._symbol_nodes(spec, limits),
        )

    def _single(self, found: list[tuple[sympy.Expr, str]]) -> sympy.Expr | None:
        bounds = {sympy.expand(bound) for bound, _ in found}
        if len(bounds) == 1:
            return bounds.pop()
        self.other.extend(text for _, text in found)
        return None

    def _symbol_nodes(
        self, spec: MaskSpec, limit: sympy.Expr | None
    ) -> tuple[tuple[sympy.Symbol, fx.Node], ...]:
        exprs = [spec.q_offset, spec.window, limit, *(load.kv_offset for load in spec.padding)]
        wanted = {s for expr in exprs if expr is not None for s in expr.free_symbols}
        nodes: dict[sympy.Symbol, fx.Node] = {}
        for symbol in sorted(wanted, key=str):
            if str(symbol) in self.sources:
                nodes[symbol] = self.sources[str(symbol)]
                continue
            for node in self.graph.nodes:
                if _is_symbol(value_of(node), symbol):
                    nodes[symbol] = node
                    break
        return tuple(nodes.items())


def _loads(expr: sympy.Expr) -> set[sympy.Expr]:
    """The elements of tensors that expr depends on; 0-dim tensors are symbols, not among them."""
    return set(expr.atoms(AppliedUndef))


def _is_symbol(value: object, symbol: sympy.Symbol) -> bool:
    return isinstance(value, torch.SymInt) and size_expr(value) == symbol


def _text(conjunct: Conjunct) -> str:
    match conjunct:
        case Compare(op, left, right):
            return f"{left} {op} {right}"
        case Load(element):
            return f"{element.node.name}[{', '.join(map(str, element.coords))}]"
        case Unread(text):
            return text
    return "never true"
