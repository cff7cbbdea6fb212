"""SiteRecord: what one attention call of one run kept; made of its route calls after the run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from crisp_flex.block_lists import kept_blocks, visible_blocks
from crisp_flex.report import SiteReport
from crisp_flex.routing.params import STAT_NAMES, RouteParams

# By the statistic "route"; what is estimated is each row's block masses (routing.guards).
ROUTES = ("lines", "estimate", "both views", "all blocks")


@dataclass(slots=True)
class PartialCall:
    """One route call as it was noted: device tensors of its own, and numbers that Python knows.

    Args:
        counts: [2, B, Hq, Nq] int32, lengths of the partial and the full lists.
        stats: [B, Hq, len(STAT_NAMES)] fp32.
        Lq: Queries.
        Lkv: Keys.
        slots: (partial, full) slots of a row in the lists.
        params: The op's arguments.
        masses: A pair (query block, [B, Hq] fp32) per audited query block.
        heads: Heads of the first sequence whose lists were kept, [n] int64 on the device.
        lists: counts [2, n, Nq] and buffer [n, Nq, P + Nkv] of these heads.
        padded: The call has a padding mask, or keys behind the last query.
    """

    counts: Tensor
    stats: Tensor
    Lq: int
    Lkv: int
    slots: tuple[int, int]
    params: RouteParams
    masses: list[tuple[int, Tensor]] = field(default_factory=list)
    heads: Tensor | None = None
    lists: tuple[Tensor, Tensor] | None = None
    padded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteRecord:
    """What one attention call of one run kept. Shares are in [0, 1]; heads in the model's order.

    Args:
        run: Number of the graph's run; all calls of one prompt step of a whole model share it.
        site: Path of the calling module, or the number of the call where no graph is known.
        model: Class of the model, "" where it is not known.
        thread: Name of the Python thread.
        policy: Selection policy.
        length: Queries, in tokens.
        keys: Keys, in tokens.
        block_size: (query, key) edges of a block, in tokens.
        density: Kept / visible blocks over all sequences and heads, the dense last block counted.
        density_by_head: [Hq] the same, mean over the batch.
        c_struct: [Hq] mass of the first and last 128 keys on the proxy rows; -1 if not measured.
        coverage: [Hq] mass kept on the rows that selection measured, mean over the batch.
        uncovered: Largest 1 - coverage of a head.
        routes: Heads (over the batch) by the route they took, names as in ROUTES.
        heads_dense: Heads (over the batch) that keep all blocks.
        violations: Heads (over the batch) above the site's max_uncovered.
        overflow: Rows whose list does not fit into its slots; anything but 0 is a fault.
        mass: [Hq] true mass kept, mean over batch and audited query blocks; [] without an audit.
        mass_min: Least true mass kept of an audited query block of a head; None without an audit.
        audited: The query blocks that were audited.
        head_groups: Route calls that make up this one.
        masks: Head -> [Nq, Nkv] bool, blocks kept by some heads of the first sequence.
    """

    run: int
    site: str
    model: str
    thread: str
    policy: str
    length: int
    keys: int
    block_size: tuple[int, int]
    density: float
    density_by_head: list[float]
    c_struct: list[float]
    coverage: list[float]
    uncovered: float
    routes: dict[str, int]
    heads_dense: int
    violations: int
    overflow: int
    mass: list[float]
    mass_min: float | None
    audited: list[int]
    head_groups: int
    masks: dict[int, Tensor] = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, without the masks."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "masks"}


def site_record(
    parts: list[PartialCall],
    site: SiteReport | None,
    *,
    run: int,
    name: str,
    model: str,
    thread: str,
) -> SiteRecord:
    """One record of the route calls of one site, head groups joined in their order; reads back.

    Args:
        parts: At least one, in the order of the calls, which is that of the heads.
        site: What the graph says about the call, None where there is no graph.
        run: As in SiteRecord.
        name: As `site` of SiteRecord.
        model: As in SiteRecord.
        thread: As in SiteRecord.
    """
    first = parts[0]
    params, B = first.params, first.counts.shape[1]
    counts = torch.cat([part.counts.cpu() for part in parts], 2)
    stats = torch.cat([part.stats.cpu() for part in parts], 1)
    of = {stat: stats[..., i].double() for i, stat in enumerate(STAT_NAMES)}
    kept = counts.sum(0).double()  # [B, Hq, Nq]
    apart = site.last_blocks_apart if site is not None else 0
    if apart and not first.padded:
        seen = visible_blocks(first.Lq, first.Lkv, (params.block_q, params.block_kv))
        kept[:, :, -apart:] = torch.tensor(seen[-apart:], dtype=torch.float64)
    density = kept.sum(-1) / of["visible_blocks"].clamp(min=1)
    route = of["route"].round().long()
    routes = {text: int((route == i).sum()) for i, text in enumerate(ROUTES)}
    masses = torch.tensor([])
    if first.masses:  # [rows, B, Hq]
        rows = range(len(first.masses))
        masses = torch.stack([torch.cat([p.masses[i][1].cpu() for p in parts], 1) for i in rows])
    return SiteRecord(
        run=run,
        site=name,
        model=model,
        thread=thread,
        policy=params.policy,
        length=first.Lq,
        keys=first.Lkv,
        block_size=(params.block_q, params.block_kv),
        density=float(kept.sum() / of["visible_blocks"].sum().clamp(min=1)),
        density_by_head=density.mean(0).tolist(),
        c_struct=of["c_struct"].mean(0).tolist(),
        coverage=of["coverage"].mean(0).tolist(),
        uncovered=float((1 - of["coverage"]).max()) if B else 0.0,
        routes={text: count for text, count in routes.items() if count},
        heads_dense=int((density >= 1).sum()),
        violations=_violations(of, route, params, site),
        overflow=sum(_overflow(part) for part in parts),
        mass=masses.mean((0, 1)).tolist() if masses.numel() else [],
        mass_min=float(masses.min()) if masses.numel() else None,
        audited=[row for row, _ in first.masses],
        head_groups=len(parts),
        masks=_masks(parts, apart),
    )


def _violations(
    of: dict[str, Tensor], route: Tensor, params: RouteParams, site: SiteReport | None
) -> int:
    """Heads above max_uncovered; a head that the op sent dense for it has covered all since."""
    limit = site.max_uncovered if site is not None else params.max_uncovered
    above = (1 - of["coverage"]) > limit
    acted = site is None or site.on_violation == "dense"
    if acted and params.policy not in ("hybrid", "bounded", "dense"):
        above = above | (route == ROUTES.index("all blocks"))
    return int(above.sum())


def _overflow(part: PartialCall) -> int:
    slots = torch.tensor(part.slots)[:, None, None, None]
    return int((part.counts.cpu() > slots).sum())


def _masks(parts: list[PartialCall], apart: int) -> dict[int, Tensor]:
    masks: dict[int, Tensor] = {}
    start = 0
    for part in parts:
        if part.heads is not None and part.lists is not None:
            counts, buffer = (x.cpu() for x in part.lists)
            Nkv = -(-part.Lkv // part.params.block_kv)
            kept = kept_blocks(counts[0], buffer, counts[1], Nkv)
            if apart and not part.padded:
                sizes = (part.params.block_q, part.params.block_kv)
                seen = torch.tensor(visible_blocks(part.Lq, part.Lkv, sizes)[-apart:])
                kept[:, -apart:] = torch.arange(Nkv) < seen[:, None]
            for head, mask in zip(part.heads.tolist(), kept, strict=True):
                masks[start + head] = mask
        start += part.counts.shape[2]
    return masks
