"""What lift_mask hands on: the reading of one attn_mask, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import sympy

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
class MaskSpec:
    """A mask over (b, h, q, k) as a conjunction; the default is the all-true mask.

    An empty `other` and no flag among chunk, documents and by_position: the mask is exactly the
    conjunction of the rest.  Otherwise the rest is necessary, but not sufficient, for visibility.
    Expressions are integers over shape symbols and over the symbols named in `symbols`.

    Args:
        causal: k <= q + q_offset.
        q_offset: Position of query 0 minus position of key 0, in tokens; 0 unless causal.
        window: k > q + q_offset - window, in tokens, the query's own among them.
        chunk: Query and key lie in the same chunk of positions.
        padding: Keys that a 2-D tensor marks as valid.
        documents: Query and key lie in the same packed document.
        kv_limit: k < kv_limit.
        by_position: k is at most a position that is read from a tensor at run time.
        other: The text of each conjunct that was not read.
        volatile: Tensors read by padding, q_offset, window or kv_limit that a later node changes in
            place: their values hold where the mask stands in the graph, and only there.
        finite: What is hidden is hidden by a finite number, the minimum of an additive dtype:
            a row that sees nothing then has equal weights, where it gives 0 otherwise.
        symbols: The nodes behind the free symbols of q_offset, window, kv_limit and kv_offset; a
            symbol without a node of its own (a size of some tensor) is left out.
    """

    causal: bool = False
    q_offset: sympy.Expr = ZERO
    window: sympy.Expr | None = None
    chunk: bool = False
    padding: tuple[PaddingLoad, ...] = ()
    documents: bool = False
    kv_limit: sympy.Expr | None = None
    by_position: bool = False
    other: tuple[str, ...] = ()
    volatile: tuple[fx.Node, ...] = ()
    finite: bool = False
    symbols: tuple[tuple[sympy.Symbol, fx.Node], ...] = ()

    @property
    def is_plain_causal(self) -> bool:
        """Whether the mask is k <= q and at most one padding load without offset, nothing else."""
        return (
            self.causal
            and self.q_offset == 0
            and self.window is None
            and self.kv_limit is None
            and not (self.chunk or self.documents or self.by_position)
            and not (self.other or self.volatile)
            and len(self.padding) <= 1
            and all(load.kv_offset == 0 for load in self.padding)
        )

    @property
    def rows_see_something(self) -> bool:
        """Whether it is proved of every query that its own key is visible, if it has one."""
        return self.causal and not (
            self.padding or self.kv_limit is not None or self.tensors(self.q_offset)
        )

    @property
    def may_capture(self) -> bool:
        """Whether the kernel's mask_mod may have to read a tensor, or lists with one head."""
        sized = not self.q_offset.is_Integer
        return sized or bool(self.padding) or self.window is not None

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
