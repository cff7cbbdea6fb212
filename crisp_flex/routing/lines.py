"""Vertical and slash lines: which are kept by a sink-aware floor, and the blocks they cover.

Source: CRISP, arXiv 2609.01925, vertical-slash route; here with anchors for ragged lengths, and a
slash covers every block that it touches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from crisp_flex.routing.geometry import WINDOW_TOKENS, Geometry
from crisp_flex.routing.probe import Probe


@dataclass(frozen=True, slots=True)
class Lines:
    """Kept lines per head: verticals [B, Hq, Nkv] by key block, slashes [B, Hq, Nkv] by bin."""

    verticals: Tensor
    slashes: Tensor


def select_lines(
    probe: Probe, geometry: Geometry, multiple: float | Tensor, *, k_min: int
) -> Lines:
    """The lines above multiple times their floor, with all anchors and at least k_min others.

    Args:
        probe: Masses of the proxy rows.
        geometry: Of this call.
        multiple: Of the floor; a number, or one per head, [B, Hq, 1].
        k_min: Least number of lines per direction besides the anchors.
    """
    v_anchor, v_entry = vertical_anchors(geometry)
    s_anchor, s_entry = slash_anchors(geometry)
    return Lines(
        verticals=above_floor(probe.p_v, v_anchor, v_entry, multiple, k_min=k_min),
        slashes=above_floor(probe.p_s, s_anchor, s_entry, multiple, k_min=k_min),
    )


def vertical_anchors(g: Geometry) -> tuple[Tensor, Tensor]:
    """Key blocks that are anchors, and all that are there: [B', 1, Nkv] bool each.

    Anchors: the block of the first valid key, and those that hold the last 128 keys.
    """
    blocks = torch.arange(g.Nkv, device=g.start.device)
    recent = (g.end - WINDOW_TOKENS).maximum(g.start) // g.block_kv
    last = (g.end - 1) // g.block_kv
    anchor = (blocks == g.first_block[:, None]) | _between(blocks, recent, last)
    return (anchor & g.filled)[:, None], g.filled[:, None]


def slash_anchors(g: Geometry) -> tuple[Tensor, Tensor]:
    """Distance bins that are anchors, and all that occur: [B', 1, Nkv] bool each.

    Anchors: bin 0 to the largest distance from the last query into the blocks that hold the last
    128 keys (bin 1 if ragged), and the bins in which the proxy rows see the first valid key (the
    last one, the last two if ragged).
    """
    bins = torch.arange(g.Nkv, device=g.start.device)
    recent_block = (g.end - WINDOW_TOKENS).maximum(g.start) // g.block_kv
    recent = (g.end - 1 - recent_block * g.block_kv) // g.block_kv
    last = torch.div(g.end - 1 - g.start, g.block_kv, rounding_mode="floor")
    sink = (g.proxy_start() - g.start) // g.block_kv
    entry = bins <= last[:, None]
    anchor = (bins <= recent[:, None]) | _between(bins, sink, last)
    return (anchor & entry)[:, None], entry[:, None]


def above_floor(
    mass: Tensor, anchor: Tensor, entry: Tensor, multiple: float | Tensor, *, k_min: int
) -> Tensor:
    """Anchors, entries above multiple * floor, and the k_min largest if fewer than that are.

    The floor is the mean mass of what is no anchor, at least 1 / (1024 * entries). Of equal masses
    the lower index wins.

    Args:
        mass: [B, Hq, N] fp32, sums to 1.
        anchor: [B', 1, N] bool.
        entry: [B', 1, N] bool, True for all anchors.
        multiple: A number, or one per head, [B, Hq, 1].
        k_min: Least number of entries besides the anchors.

    Returns:
        [B, Hq, N] bool.
    """
    candidate = entry & ~anchor
    # equals 1 - anchor mass; summed, so that a lone candidate is exactly its own mean
    rest = (mass * candidate).sum(-1, keepdim=True)
    floor = rest / candidate.sum(-1, keepdim=True).clamp(min=1)
    floor = floor.maximum(1 / (1024 * entry.sum(-1, keepdim=True).clamp(min=1)))
    kept = (mass > multiple * floor) & candidate
    if k_min:
        order = (
            torch.where(candidate, mass, -1.0).sort(dim=-1, descending=True, stable=True).indices
        )
        largest = torch.zeros_like(kept).scatter(-1, order[..., :k_min], True)
        # the threshold set holds the largest entries, so the union is the larger of the two sets
        kept = kept | (largest & candidate)
    return kept | anchor


def cover(lines: Lines, geometry: Geometry, rows: Tensor | None = None) -> Tensor:
    """Blocks that the lines touch, causal or not.

    Args:
        lines: Kept lines.
        geometry: Of this call.
        rows: [B', R] int64 query blocks; None for all, in order.

    Returns:
        [B, Hq, R, Nkv] bool.
    """
    B, Hq, Nkv = lines.slashes.shape
    lo, hi = geometry.slash_bins()
    if rows is None:
        rows = torch.arange(geometry.Nq, device=lo.device)[None]
    blocks = torch.arange(Nkv, device=lo.device)
    # below[t]: kept bins before t, so that a difference of two tells whether a range has one
    below = torch.nn.functional.pad(lines.slashes.cumsum(-1, dtype=torch.int32), (1, 0))

    def kept_before(bins: Tensor) -> Tensor:
        index = (bins[:, :, None] - blocks).clamp(0, Nkv).flatten(1)  # [B', R * Nkv]
        return below.gather(-1, index[:, None].expand(B, Hq, -1))

    touched = kept_before(hi[rows] + 1) > kept_before(lo[rows])
    return touched.view(B, Hq, -1, Nkv) | lines.verticals[:, :, None]


def always(g: Geometry) -> Tensor:
    """Blocks that every policy keeps, visible or not: [B', 1, Nq, Nkv] bool.

    The column of the first valid key, the diagonals that distances below 128 tokens touch, and
    the last visible block of each row.
    """
    blocks = torch.arange(g.Nkv, device=g.start.device)
    lo, hi = g.slash_bins()
    last_bin = (WINDOW_TOKENS - 1) // g.block_kv
    recent = _between(blocks, lo - last_bin, hi)
    column = blocks == g.first_block[:, None, None, None]
    return column | recent | (blocks == g.last_block[..., None])


def _between(index: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """[R, N] bool: first[r] <= index[n] <= last[r]."""
    return (index >= first[:, None]) & (index <= last[:, None])
