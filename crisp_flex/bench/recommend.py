"""Recommendation: the settings that follow from times of sparse and of dense attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Sparse must be faster by this much, at a length and all longer ones, to be recommended there.
LEAST_GAIN = 1.05
# "accurate" is recommended where it takes at most this much longer than "balanced".
MOST_SLOWER = 1.10


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One preset at one length.

    Args:
        length: Tokens of the prompt.
        preset: "fast", "balanced" or "accurate".
        kernel: FlexAttention kernel: "FLASH", "TRITON" or "CPU".
        density: Kept / visible blocks, in [0, 1].
        mass: True attention mass kept on the audited query blocks, mean over heads, in [0, 1].
        error: Relative error against fp32 attention over the kept blocks, on sampled query blocks.
        dense: The fastest dense SDPA.
        dense_ms: Its median time, milliseconds.
        sparse_ms: The same of `crisp_flex.sparse_attention`, selection included.
        timed: How it was timed: "graph" (a CUDA graph) or "launches".
    """

    length: int
    preset: str
    kernel: str
    density: float
    mass: float
    error: float
    dense: str
    dense_ms: float
    sparse_ms: float
    timed: str

    @property
    def ratio(self) -> float:
        """Dense over sparse time: above 1 sparse is faster."""
        return self.dense_ms / self.sparse_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """What to set.

    Args:
        preset: "balanced", or "accurate" where it costs little more.
        min_seqlen: Tokens from which on sparse was faster; longest + 1 where it was not.
        pays: Whether sparse was faster at any length that was measured.
        longest: The longest length that was measured, tokens.
    """

    preset: str
    min_seqlen: int
    pays: bool
    longest: int

    def __str__(self) -> str:
        if self.pays:
            return f'preset "{self.preset}", sparse from {self.min_seqlen} tokens on'
        return (
            f"stay dense up to {self.longest} tokens: sparse attention was not faster there, and "
            "longer prompts were not measured"
        )


def recommend(rows: Sequence[Row]) -> Recommendation:
    """The settings that follow from the rows of `measure_layer`.

    "fast" is never recommended: what it loses depends on the model (`crisp-flex quality`).

    Args:
        rows: At least one of preset "balanced" and of "accurate" at the longest length.

    Example:
        >>> def row(length, preset, sparse_ms):
        ...     return Row(length=length, preset=preset, kernel="TRITON", density=0.2, mass=0.9,
        ...                error=0.0, dense="flash", dense_ms=length / 1024, sparse_ms=sparse_ms,
        ...                timed="graph")
        >>> rows = [row(4096, "balanced", 4.5), row(8192, "balanced", 5.0)]
        >>> str(recommend([*rows, row(8192, "accurate", 6.0)]))
        'preset "balanced", sparse from 8192 tokens on'
    """
    longest = max(row.length for row in rows)
    at_longest = {row.preset: row.sparse_ms for row in rows if row.length == longest}
    careful = at_longest["accurate"] <= MOST_SLOWER * at_longest["balanced"]
    for preset in ("accurate", "balanced") if careful else ("balanced",):
        least = _least_tokens([row for row in rows if row.preset == preset])
        if least is not None:
            return Recommendation(preset=preset, min_seqlen=least, pays=True, longest=longest)
    return Recommendation(preset="balanced", min_seqlen=longest + 1, pays=False, longest=longest)


def _least_tokens(rows: list[Row]) -> int | None:
    """The least length from which on sparse is faster, None where it is not at the longest."""
    least = None
    for row in sorted(rows, key=lambda row: -row.length):
        if row.ratio < LEAST_GAIN:
            break
        least = row.length
    return least
