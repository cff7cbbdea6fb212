"""What lift_mask hands on: the reading of one attn_mask, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import sympy

from crisp_flex.passes.mask_formula import K, Q
from crisp_flex.passes.node_ops import tensor_of

if TYPE_CHECKING:
    from torch import fx

ZERO = sympy.Integer(0)


@dataclass(frozen=True, slots=True)
class PaddingLoad:
    """One conjunct that says which keys of a batch row are valid.

    The mask lets (b, h, q, k) through only if `source[row, k + kv_offset]` is not zero, where row
    is b if per_batch and 0 otherwise.

    Args:
        source: 2-D tensor node of any dtype, (B, >= Lkv) if per_batch and (1, >= Lkv) if not;
            under a kv_limit its second dimension may end there. A symbolic first dimension may have
            another symbol than B.
        kv_offset: Tokens between key k and its column in source, >= 0.
        per_batch: False where one row serves the whole batch.
    """

    source: fx.Node
    kv_offset: sympy.Expr = ZERO
    per_batch: bool = True


@dataclass(frozen=True, slots=True)
class SameIds:
    """The mask lets (b, h, q, k) through only if two ids are equal: of a document, of a chunk.

    Args:
        of_query: The query's id, an integer expression of b, q, sizes and elements of tensors.
        of_key: The key's, of b, k and the like.
        sources: The tensor behind each symbol and function for a loaded element, by name.
    """

    of_query: sympy.Expr
    of_key: sympy.Expr
    sources: tuple[tuple[str, fx.Node], ...] = ()

    def own_key_has_it(self, q_offset: sympy.Expr) -> bool:
        """Whether it is proved that the key at a query's own position has the query's id."""
        moved, own = self.of_query.xreplace({Q: K - q_offset}), self.of_key
        return bool(sympy.expand(_quotient(moved) - _quotient(own)) == 0)

    def chunk_size(self, q_offset: sympy.Expr) -> int | None:
        """C where both ids are the same floor(x / C) + n of a position x, so that ids differ
        where positions are C apart; else None.
        """
        if not self.own_key_has_it(q_offset):
            return None
        position, size = _quotient(self.of_key).as_numer_denom()
        if self.of_key.func is not sympy.floor and not self.of_key.is_Add:
            return None
        if not size.is_Integer or size == 1 or K in sympy.expand(position - K).free_symbols:
            return None
        return int(size)


def _quotient(ids: sympy.Expr) -> sympy.Expr:
    """x / C of ids = floor(x / C) + n, n put into x; ids of another form as they are."""
    floors = ids.atoms(sympy.floor)
    if len(floors) != 1:
        return ids
    (floor,) = floors
    rest = sympy.expand(ids - floor)
    return sympy.expand(floor.args[0] + rest) if rest.is_Integer else ids


@dataclass(frozen=True, slots=True)
class MaskSpec:
    """A mask over (b, h, q, k) as a conjunction; the default is the all-true mask.

    An empty `other` and by_position not set: the mask is exactly the conjunction of the rest.
    Otherwise the rest is necessary, but not sufficient, for visibility.
    Expressions are integers over shape symbols and over the symbols named in `symbols`.

    Args:
        causal: k <= q + q_offset.
        q_offset: Position of query 0 minus position of key 0, in tokens; 0 unless causal.
        window: k > q + q_offset - window, in tokens, the query's own among them.
        same: Ids that are equal for query and key: chunks of positions, packed documents.
        padding: Keys that a 2-D tensor marks as valid.
        kv_limit: k < kv_limit.
        by_position: k is at most a position that is read from a tensor at run time.
        other: The text of each conjunct that was not read.
        volatile: Tensors read by padding, same, q_offset, window or kv_limit that a later node
            changes in place: their values hold where the mask stands in the graph, and only there.
        finite: What is hidden is hidden by a finite number, the minimum of an additive dtype:
            a row that sees nothing then has equal weights, where it gives 0 otherwise.
        symbols: The nodes behind the free symbols of q_offset, window, kv_limit and kv_offset; a
            symbol without a node of its own (a size of some tensor) is left out.
    """

    causal: bool = False
    q_offset: sympy.Expr = ZERO
    window: sympy.Expr | None = None
    same: tuple[SameIds, ...] = ()
    padding: tuple[PaddingLoad, ...] = ()
    kv_limit: sympy.Expr | None = None
    by_position: bool = False
    other: tuple[str, ...] = ()
    volatile: tuple[fx.Node, ...] = ()
    finite: bool = False
    symbols: tuple[tuple[sympy.Symbol, fx.Node], ...] = ()

    @property
    def chunk(self) -> bool:
        """Whether query and key must lie in the same chunk of positions."""
        return any(same.of_key.has(sympy.floor) for same in self.same)

    @property
    def documents(self) -> bool:
        """Whether query and key must lie in the same packed document."""
        return any(not same.of_key.has(sympy.floor) for same in self.same)

    @property
    def is_plain_causal(self) -> bool:
        """Whether the mask is k <= q and at most one padding load without offset, nothing else."""
        return (
            self.causal
            and self.q_offset == 0
            and self.window is None
            and self.kv_limit is None
            and not (self.same or self.by_position)
            and not (self.other or self.volatile)
            and len(self.padding) <= 1
            and all(load.kv_offset == 0 for load in self.padding)
        )

    @property
    def rows_see_something(self) -> bool:
        """Whether it is proved of every query that its own key is visible, if it has one."""
        own = all(same.own_key_has_it(self.q_offset) for same in self.same)
        return (self.causal and own) and not (
            self.padding or self.kv_limit is not None or self.tensors(self.q_offset)
        )

    @property
    def may_capture(self) -> bool:
        """Whether the kernel's mask_mod may have to read a tensor, or lists with one head."""
        sized = not self.q_offset.is_Integer
        return sized or bool(self.padding or self.same) or self.window is not None

    def tensors(self, expr: sympy.Expr) -> dict[sympy.Symbol, fx.Node]:
        """The symbols of expr that stand for an element of a tensor, not for a size."""
        nodes = dict(self.symbols)
        return {
            s: nodes[s] for s in expr.free_symbols if s in nodes and tensor_of(nodes[s]) is not None
        }

    def describe(self) -> str:
        """One line for reports, as in "causal + window 4096 + padding"."""
        parts = ["causal"] if self.causal else []
        if self.q_offset != 0:
            parts.append(f"offset {self.q_offset}")
        if self.window is not None:
            parts.append(f"window {self.window}")
        if self.chunk:
            parts.append("chunk")
        parts.extend(
            "padding" if load.kv_offset == 0 else f"padding from key {load.kv_offset}"
            for load in self.padding
        )
        if self.documents:
            parts.append("documents")
        if self.kv_limit is not None:
            parts.append(f"limit {self.kv_limit}")
        if self.by_position:
            parts.append("by position")
        parts.extend(f"other ({text})" for text in self.other)
        return " + ".join(parts) or "all visible"
