"""policy="hybrid", the default: two views of every head, one floor, its multiple audited.

The pooled map decides per row, the proxy lines per head, both against a sink-aware noise floor.
How many times the floor a block must reach is the largest multiple whose selection still holds the
target mass on exactly computed rows (ours; the floor is CRISP's, arXiv 2609.01925).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from crisp_flex.routing.geometry import Geometry, take_rows
from crisp_flex.routing.guards import ROUTE_ALL_BLOCKS, ROUTE_BOTH_VIEWS, Choice
from crisp_flex.routing.lines import always, cover, select_lines
from crisp_flex.routing.params import RouteParams
from crisp_flex.routing.pool import pool, pooled_map
from crisp_flex.routing.probe import Probe, probe

# Multiples of the floor that the audit tries, the sparsest last; 0 stands for all blocks.
MULTIPLES = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
# Lines must reach this many times the multiple of the rows.
_LINE_FACTOR = 2.0
# The audit asks for this much more than the target, against rounding.
_COVERAGE_MARGIN = 1e-4


@dataclass(frozen=True, slots=True)
class _Rows:
    """All that decides over some query blocks R: every field [B or B', 1 or Hq, R, 1 or Nkv]."""

    estimate: Tensor
    floor: Tensor
    always: Tensor
    visible: Tensor
    # [B', R] int64 ids of the query blocks, None for all in order.
    blocks: Tensor | None


def select(query: Tensor, key: Tensor, geometry: Geometry, params: RouteParams) -> Choice:
    """Per head the sparsest of a few selections that holds params.coverage on the audit rows."""
    measured = probe(query, key, geometry, scale=params.scale, audit_rows=params.audit_rows)
    mean_query, mean_key = pool(query, key, geometry)
    estimate = pooled_map(mean_query, mean_key, geometry.visible, params.scale)
    rows = _Rows(
        estimate=estimate,
        floor=_row_floor(estimate, geometry),
        always=always(geometry),
        visible=geometry.visible,
        blocks=None,
    )
    multiple, coverage = _audit(rows, measured, geometry, params)
    all_blocks = multiple == 0
    kept = _keep(rows, measured, geometry, multiple)
    return Choice(
        keep=(kept | all_blocks[:, :, None, None]) & geometry.visible,
        c_struct=measured.c_struct,
        coverage=coverage,
        multiple=multiple,
        route=torch.where(all_blocks, ROUTE_ALL_BLOCKS, ROUTE_BOTH_VIEWS),
    )


def _row_floor(estimate: Tensor, g: Geometry) -> Tensor:
    """mu [B, Hq, Nq, 1]: mean pooled mass of a row without its first and its last visible block."""
    blocks = torch.arange(g.Nkv, device=estimate.device)
    ends = (blocks == g.first_block[:, None, None, None]) | (blocks == g.last_block[..., None])
    # equals 1 - both masses; summed, so that for n = 3 the middle block is exactly its own mean
    rest = estimate.masked_fill(ends, 0.0).sum(-1, keepdim=True)
    n = g.visible_blocks[..., None]
    return (rest / (n - 2).clamp(min=1)).maximum(1 / (1024 * n.clamp(min=1)))


def _keep(rows: _Rows, measured: Probe, geometry: Geometry, multiple: Tensor) -> Tensor:
    """[B, Hq, R, Nkv] bool: what both views keep at a multiple per head [B, Hq]."""
    multiple = multiple[:, :, None]
    lines = select_lines(measured, geometry, _LINE_FACTOR * multiple, k_min=0)
    # so put that a row of NaN keeps all it sees
    by_row = ~(rows.estimate <= multiple[..., None] * rows.floor)
    return (by_row | cover(lines, geometry, rows.blocks) | rows.always) & rows.visible


def _audit(
    rows: _Rows, measured: Probe, geometry: Geometry, params: RouteParams
) -> tuple[Tensor, Tensor]:
    """The multiple of each head (0: all blocks) and the coverage that it reaches, [B, Hq] each."""
    blocks = measured.audit_blocks
    audited = _Rows(
        estimate=take_rows(rows.estimate, blocks),
        floor=take_rows(rows.floor, blocks),
        always=take_rows(rows.always, blocks),
        visible=take_rows(rows.visible, blocks),
        blocks=blocks,
    )
    coverage = _reduce_coverage(audited.visible, measured, params.coverage_reduce)
    chosen = torch.zeros_like(coverage)
    for value in MULTIPLES:
        multiple = torch.full_like(chosen, value)
        kept = _keep(audited, measured, geometry, multiple)
        reached = _reduce_coverage(kept, measured, params.coverage_reduce)
        enough = reached >= params.coverage + _COVERAGE_MARGIN
        if params.coverage_min > 0:
            least = _reduce_coverage(kept, measured, "min")
            enough = enough & (least >= params.coverage_min + _COVERAGE_MARGIN)
        chosen = torch.where(enough, multiple, chosen)
        coverage = torch.where(enough, reached, coverage)
    return chosen, coverage


def _reduce_coverage(kept: Tensor, measured: Probe, reduce: str) -> Tensor:
    """[B, Hq] fp32: mean or min over the distinct audit rows of the mass in kept, 1 if no rows."""
    by_row = (measured.audit_mass * kept).sum(-1)  # [B, Hq, m]
    distinct = measured.audit_distinct[:, None]
    if reduce == "min":
        return by_row.masked_fill(~distinct, 1.0).amin(-1)
    if reduce == "mean":
        count = distinct.sum(-1)
        mean = (by_row * distinct).sum(-1) / count.clamp(min=1)
        return torch.where(count > 0, mean, 1.0)
    raise ValueError(f"coverage_reduce must be mean or min, got {reduce!r}")
