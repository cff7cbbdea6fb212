"""policy="bounded": per head the sparsest selection that moves its output by less than a bound.

A row drops the blocks of least estimated mass as long as their sum is at most a left-out share. The
share of a head is the largest of a few whose error, on exactly computed rows of the attention
output, is below the bound. Ours; like the audit of "hybrid", but of the output instead of the mass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from crisp_flex.routing.estimate import estimate
from crisp_flex.routing.geometry import Geometry, take_rows
from crisp_flex.routing.guards import ROUTE_ALL_BLOCKS, ROUTE_ESTIMATE, Choice
from crisp_flex.routing.lines import always
from crisp_flex.routing.output_error import output_error
from crisp_flex.routing.params import RouteParams
from crisp_flex.routing.pool import pool

# Shares of a row's estimated mass that the audit tries to leave out, the sparsest first; a head
# for which none will do keeps all blocks, which the statistic "multiple" says as 0.
LEFT_OUT = (
    0.6, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1, 0.07, 0.05, 0.03, 0.02, 0.01, 0.005, 0.001,
)  # fmt: skip


def select(
    query: Tensor, key: Tensor, value: Tensor, geometry: Geometry, params: RouteParams
) -> Choice:
    """Per head the sparsest of a few selections with an output error within params.max_error.

    Args:
        query: [B, Hq, Lq, D], any float dtype.
        key: [B, Hkv, Lkv, D], Hq a multiple of Hkv.
        value: [B, Hkv, Lkv, Dv].
        geometry: Of this call.
        params: max_error is relative to the root of the mean squared norm of the heads' outputs.
    """
    g = geometry
    rest = tail_mass(estimate(pool(query, key, g)[0], key, g, params.scale))
    share, coverage, c_struct = _audit(query, key, value, rest, g, params)
    all_blocks = share == 0
    kept = keep_above(rest, share[:, :, None, None]) | always(g)
    return Choice(
        keep=(kept | all_blocks[:, :, None, None]) & g.visible,
        c_struct=c_struct,
        coverage=coverage,
        multiple=share,
        route=torch.where(all_blocks, ROUTE_ALL_BLOCKS, ROUTE_ESTIMATE),
    )


def tail_mass(mass: Tensor) -> Tensor:
    """[..., N] fp32: what a row loses if it drops an entry and all that are not larger.

    Args:
        mass: [..., N] fp32, at least 0; a row with NaN gives NaN throughout.
    """
    ordered = mass.sort(dim=-1).values
    # the last of equal entries: they are dropped together or not at all
    last = torch.searchsorted(ordered, mass.contiguous(), right=True) - 1
    tail = ordered.cumsum(-1).gather(-1, last.clamp(min=0))
    return tail.masked_fill(mass.isnan().any(-1, keepdim=True), torch.nan)


def keep_above(rest: Tensor, share: Tensor) -> Tensor:
    """Bool: entries with a tail_mass above share; so put that a row of NaN keeps all it sees."""
    return ~(rest <= share)


def _audit(
    query: Tensor, key: Tensor, value: Tensor, rest: Tensor, g: Geometry, params: RouteParams
) -> tuple[Tensor, Tensor, Tensor]:
    """Share left out (0: all blocks), mass kept with it, and c_struct of each head, [B, Hq]."""
    blocks, distinct = g.audit_blocks(params.audit_rows)
    # filled on the device: a list copied there would make the host wait
    shares = torch.cat([rest.new_full((1,), share) for share in LEFT_OUT])
    kept = keep_above(take_rows(rest, blocks)[:, :, :, None], shares[:, None])
    kept = kept | take_rows(always(g), blocks)[:, :, :, None]
    kept = kept & take_rows(g.visible, blocks)[:, :, :, None]  # [B, Hq, m, C, Nkv]
    measured = output_error(
        query, key, value, kept, g, scale=params.scale, blocks=blocks, distinct=distinct
    )
    bound = measured.norm.mean(1)[:, None, None] * params.max_error**2
    # an Inf in the values is no bound at all
    enough = (measured.error <= bound) & bound.isfinite()
    first = enough.int().argmax(-1, keepdim=True)
    found = enough.any(-1)
    coverage = measured.kept_mass.gather(-1, first)[..., 0]
    share = torch.where(found, shares[first[..., 0]], 0.0)
    return share, torch.where(found, coverage, 1.0), measured.c_struct
