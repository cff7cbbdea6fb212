"""The eager meaning of crisp_flex::route: which key blocks each query block attends to, as lists.

geometry -> policy (probe, pool, lines, estimate, output_error) -> guards -> compact. Runs on any
device; a Triton stage has the name of its oracle here: probe, pool, compact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from crisp_flex.routing.geometry import Geometry, partial_slots
from crisp_flex.routing.guards import NOT_MEASURED, finish_rows
from crisp_flex.routing.params import STAT_NAMES, RouteParams
from crisp_flex.routing.policies import SELECT
from crisp_flex.routing.pool import pool
from crisp_flex.routing.probe import probe

__all__ = ["STAT_NAMES", "Selection", "compact", "pool", "probe", "route", "select_blocks"]


@dataclass(frozen=True, slots=True)
class Selection:
    """Kept blocks and how they came about.

    Attributes:
        keep: [B, Hq, Nq, Nkv] bool, a subset of the visible blocks; a row is empty only if it sees
            nothing.
        stats: [B, Hq, len(STAT_NAMES)] fp32, never NaN. kept_blocks and visible_blocks count over
            all rows. c_struct is the mass of the first and last 128 keys on the proxy rows (-1 for
            policy "dense", which does not look). coverage is the exact mass kept on the audit rows
            (hybrid, bounded) or the proxy rows, before dense_last_blocks. multiple is hybrid's
            multiple of the floor, bounded's share of the estimated mass that a row may leave out,
            0 for all blocks, -1 for other policies. route is 0 for lines, 1 for a per-row estimate
            (pooled for crisp and flexprefill, by antidiagonals for xattention, of the mean query
            for bounded, exact for oracle), 2 for both views, 3 for all blocks.
    """

    keep: Tensor
    stats: Tensor


def route(
    query: Tensor,
    key: Tensor,
    key_valid: Tensor | None,
    params: RouteParams,
    q_offset: Tensor | None = None,
    value: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Block lists of sparse causal attention, in the layout of FlexAttention's BlockMask.

    Args:
        query: [B, Hq, Lq, D], any float dtype; query i stands at position i + Lkv - Lq.
        key: [B, Hkv, Lkv, D], Hq a multiple of Hkv, Lkv >= Lq.
        key_valid: [B, Lkv] bool, False for padding; None if every key is valid.
        params: Policy and its numbers.
        q_offset: [1] integer: query i stands at position i + q_offset instead, in a cache that is
            filled up to the last query; 0 <= q_offset <= Lkv - Lq.
        value: [B, Hkv, Lkv, Dv], for a policy that reads the values (`RouteParams.reads_values`).

    Returns:
        kv_num_blocks: [B, Hq, Nq] int32, partial blocks per row.
        kv_buffer: [B, Hq, Nq, P + Nkv] int32 with P = partial_slots(...): the partial
            blocks ascending from slot 0, the full ones ascending from slot P, 0 elsewhere.
        full_kv_num_blocks: [B, Hq, Nq] int32, full blocks per row.
        stats: See Selection.
    """
    if query.shape[0] == 0:  # the shapes are those of a batch of one
        batch_of_one = (query.new_zeros(1, *query.shape[1:]), key.new_zeros(1, *key.shape[1:]))
        valid = None if key_valid is None else key_valid.new_ones(1, key_valid.shape[1])
        one_value = None if value is None else value.new_zeros(1, *value.shape[1:])
        counts, buffer, full_counts, stats = route(
            *batch_of_one, valid, params, q_offset, one_value
        )
        return counts[:0], buffer[:0], full_counts[:0], stats[:0]
    geometry = Geometry.of(query, key, key_valid, params, q_offset)
    selection = _select(query, key, value, geometry, params)
    P = partial_slots(
        params.block_q,
        params.block_kv,
        geometry.Lq,
        geometry.Lkv,
        key_valid is not None,
        q_offset is not None,
    )
    partial = geometry.visible & ~geometry.full
    lists = compact(selection.keep, partial, P, geometry.Nkv)
    return *lists, selection.stats


def select_blocks(
    query: Tensor,
    key: Tensor,
    key_valid: Tensor | None,
    params: RouteParams,
    q_offset: Tensor | None = None,
    value: Tensor | None = None,
) -> Selection:
    """The blocks that route lists, as a bool map; arguments as there."""
    return _select(query, key, value, Geometry.of(query, key, key_valid, params, q_offset), params)


def compact(keep: Tensor, partial: Tensor, P: int, C: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ascending lists of the kept partial and the kept full blocks of each row, in one buffer.

    Args:
        keep: [B, Hq, Nq, Nkv] bool.
        partial: Broadcastable to keep, bool: needs the mask; a kept block without is full.
        P: Slots for partial blocks.
        C: Slots for full blocks.

    Returns:
        kv_num_blocks: [B, Hq, Nq] int32.
        kv_buffer: [B, Hq, Nq, P + C] int32; partial list from slot 0, full list from slot
            P, unused slots 0.
        full_kv_num_blocks: [B, Hq, Nq] int32.

    Raises:
        RuntimeError: A row does not fit; on CUDA as a device-side assert.
    """
    keep_partial, keep_full = keep & partial, keep & ~partial
    rank_partial = keep_partial.cumsum(-1) - 1
    rank_full = keep_full.cumsum(-1) - 1
    # one slot more than returned takes what is not kept; overflow points past even that
    unkept, overflow = P + C, P + C + 1
    slot = torch.where(keep_full, torch.where(rank_full < C, rank_full + P, overflow), unkept)
    slot = torch.where(keep_partial, torch.where(rank_partial < P, rank_partial, overflow), slot)
    blocks = torch.arange(keep.shape[-1], dtype=torch.int32, device=keep.device)
    buffer = torch.zeros(*keep.shape[:-1], P + C + 1, dtype=torch.int32, device=keep.device)
    buffer.scatter_(-1, slot, blocks.expand(keep.shape))
    return (
        keep_partial.sum(-1, dtype=torch.int32),
        buffer[..., : P + C].contiguous(),
        keep_full.sum(-1, dtype=torch.int32),
    )


def _select(
    query: Tensor, key: Tensor, value: Tensor | None, geometry: Geometry, params: RouteParams
) -> Selection:
    """Run the policy and, unless it is "dense", the guards on its rows."""
    if params.policy not in SELECT:
        raise ValueError(f"policy must be one of {sorted(SELECT)}, got {params.policy!r}")
    inputs: tuple[Tensor, ...] = (query, key)
    if params.reads_values:
        if value is None:
            raise ValueError(f"policy {params.policy!r} reads the values: give route value=")
        inputs = (query, key, value)
    # the caller's autocast reaches into an op, and would put the fp32 sums of masses into 16 bits
    with torch.autocast(query.device.type, enabled=False):
        choice = SELECT[params.policy](*inputs, geometry, params)
    keep = choice.keep
    if params.policy != "dense":
        keep = finish_rows(keep, geometry, dense_last_blocks=params.dense_last_blocks)
    stats = (
        keep.sum((-2, -1)),
        geometry.visible.sum((-2, -1)).expand(keep.shape[:2]),
        choice.c_struct.nan_to_num(NOT_MEASURED),
        choice.coverage.nan_to_num(1.0),
        choice.multiple,
        choice.route,
    )
    return Selection(keep, torch.stack([s.float() for s in stats], -1))
