"""What holds after any selection: enough of the proxy mass, dense last blocks, no empty row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from crisp_flex.routing.geometry import Geometry, take_rows
from crisp_flex.routing.probe import Probe

# Values of the statistic "route". An estimate is one of each row's block masses: pooled (crisp,
# flexprefill), by antidiagonals (xattention), of the mean query (bounded) or exact (oracle).
ROUTE_VERTICAL_SLASH = 0.0
ROUTE_ESTIMATE = 1.0
ROUTE_BOTH_VIEWS = 2.0
ROUTE_ALL_BLOCKS = 3.0
# The statistic of a policy that does not have it.
NOT_MEASURED = -1.0


@dataclass(frozen=True, slots=True)
class Choice:
    """What a policy selects, before dense_last_blocks, and its statistics, [B, Hq] fp32 each."""

    # [B, Hq, Nq, Nkv] bool, a subset of the visible blocks.
    keep: Tensor
    # Mass of the first and last 128 keys, mean over the proxy rows; NOT_MEASURED if not probed.
    c_struct: Tensor
    # Exact mass that keep holds on the audit rows, or else on the proxy rows; in [0, 1].
    coverage: Tensor
    # What the audit chose, a multiple of the floor (hybrid) or a share of the estimated mass to
    # leave out (bounded), 0 for all blocks; NOT_MEASURED without an audit.
    multiple: Tensor
    # One of the ROUTE_ values.
    route: Tensor


def proxy_coverage(keep: Tensor, probe: Probe) -> Tensor:
    """[B, Hq] fp32: mass of the proxy rows in keep [B, Hq, Nq, Nkv]; 1 if there are none."""
    kept = (probe.proxy_mass * take_rows(keep, probe.proxy_blocks)).sum((-2, -1))
    return torch.where(probe.has_rows[:, None], kept, 1.0)


def choose_or_keep_all(
    keep: Tensor, probe: Probe, geometry: Geometry, *, route: Tensor, max_uncovered: float
) -> Choice:
    """The choice of a policy without an audit, all visible blocks where it leaves too much out.

    Args:
        keep: [B, Hq, Nq, Nkv] bool.
        probe: Masses of the proxy rows.
        geometry: Of this call.
        route: [B, Hq] fp32.
        max_uncovered: Mass left out on the proxy rows above which a head keeps all blocks.
    """
    short = ~(1 - proxy_coverage(keep, probe) <= max_uncovered)  # NaN is short, too
    keep = (keep | short[:, :, None, None]) & geometry.visible
    return Choice(
        keep=keep,
        c_struct=probe.c_struct,
        coverage=proxy_coverage(keep, probe),
        multiple=torch.full_like(route, NOT_MEASURED),
        route=torch.where(short, ROUTE_ALL_BLOCKS, route),
    )


def finish_rows(keep: Tensor, g: Geometry, *, dense_last_blocks: int) -> Tensor:
    """Keep with its last rows dense and the rows of padding reduced to one block.

    The last dense_last_blocks query blocks up to the last valid query keep all that is visible. A
    row keeps its last visible block in any case, and a row of padding keeps nothing else.
    """
    rows = torch.arange(g.Nq, device=g.end.device)
    last_row = ((g.end - 1 - g.offset) // g.block_q)[:, None]
    dense = (rows > last_row - dense_last_blocks) & (rows <= last_row)  # [B', Nq]
    blocks = torch.arange(g.Nkv, device=g.end.device)
    keep = (keep | dense[:, None, :, None]) & g.live[:, None, :, None]
    return (keep | (blocks == g.last_block[..., None])) & g.visible
