"""policy="bounded" on the GPU: pool -> estimate -> output_error -> select -> stats.

Oracle: reference.route. No read-back, no atomics: two runs give the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from crisp_flex.routing.guards import NOT_MEASURED, ROUTE_ALL_BLOCKS, ROUTE_ESTIMATE
from crisp_flex.routing.kernels.block_counts import block_counts, store_stats
from crisp_flex.routing.kernels.bounded_lists import bounded_lists
from crisp_flex.routing.kernels.choose_share import Choice, choose_share
from crisp_flex.routing.kernels.compact import Lists
from crisp_flex.routing.kernels.estimate import estimate
from crisp_flex.routing.kernels.layout import Layout
from crisp_flex.routing.kernels.output_error import output_error
from crisp_flex.routing.kernels.pool import pool_queries
from crisp_flex.routing.kernels.ranges import stage
from crisp_flex.routing.kernels.route import MOST_AUDIT_ROWS, takes
from crisp_flex.routing.kernels.sampled_rows import row_blocks
from crisp_flex.routing.params import STAT_NAMES, RouteParams


def supports(query: Tensor, key: Tensor, params: RouteParams) -> bool:
    """Whether the kernels take this call; the reference takes all."""
    return (
        params.policy == "bounded"
        and 1 <= params.audit_rows <= MOST_AUDIT_ROWS
        and takes(query, key, params)
    )


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
        query: [B, Hq, Lq, D], any strides; query i stands at position i + q_offset.
        key: [B, Hkv, Lkv, D], Hq a multiple of Hkv, Lkv >= Lq, any strides.
        key_valid: [B, Lkv] bool, False for padding; None if every key is valid.
        params: Numbers of the policy "bounded"; see supports.
        q_offset: [1] integer, on the same device, in [0, Lkv - Lq]; None is Lkv - Lq.
        value: [B, Hkv, Lkv, Dv], any strides.

    Returns:
        As reference.route.

    Raises:
        ValueError: There are no values.
    """
    import torch

    if value is None:
        raise ValueError('policy "bounded" measures the attention output: it needs the values')
    with torch.cuda.device_of(query):
        layout = Layout.of(query, key, key_valid, params, q_offset)
        with stage("pool"):
            mean_query = pool_queries(query, layout)
        with stage("estimate"):
            by_block = estimate(mean_query, key, layout, scale=params.scale)
        with stage("output_error"):
            rows = row_blocks(
                query, key, value, layout, scale=params.scale, audit_rows=params.audit_rows
            )
            errors = output_error(rows, by_block, layout)
            chosen = choose_share(errors, max_error=params.max_error)
            del rows
        with stage("select"):
            lists = bounded_lists(by_block, chosen.share, layout, params)
        with stage("stats"):
            statistics = _stats(lists, chosen, layout)
    return lists.counts, lists.buffer, lists.full_counts, statistics


def _stats(lists: Lists, chosen: Choice, layout: Layout) -> Tensor:
    """[B, Hq, len(STAT_NAMES)] fp32, in the order of STAT_NAMES. Oracle: reference.Selection."""
    x = layout
    out = chosen.share.new_empty((x.B, x.Hq, len(STAT_NAMES)))
    _stats_kernel[(x.B * x.Hq,)](
        lists.counts,
        lists.full_counts,
        chosen.c_struct,
        chosen.share,
        chosen.coverage,
        out,
        x.first_valid,
        x.q_offset,
        x.Hq,
        x.Lq,
        x.Lkv,
        BLOCK_Q=x.block_q,
        BLOCK_KV=x.block_kv,
        COLUMNS=len(STAT_NAMES),
        ESTIMATE=ROUTE_ESTIMATE,
        ALL_BLOCKS=ROUTE_ALL_BLOCKS,
        NOT_MEASURED=NOT_MEASURED,
        CHUNK=min(1024, triton.next_power_of_2(max(x.Nq, x.Nkv))),
    )
    return out


@triton.jit(do_not_specialize=["Hq", "Lq", "Lkv"])
def _stats_kernel(
    counts_ptr,
    full_counts_ptr,
    c_struct_ptr,
    share_ptr,
    coverage_ptr,
    out_ptr,
    first_valid_ptr,
    offset_ptr,
    Hq,
    Lq,
    Lkv,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    COLUMNS: tl.constexpr,
    ESTIMATE: tl.constexpr,
    ALL_BLOCKS: tl.constexpr,
    NOT_MEASURED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (B * Hq,)."""
    bh = tl.program_id(0).to(tl.int64)  # before the first multiply
    kept, visible = block_counts(
        counts_ptr, full_counts_ptr, first_valid_ptr, offset_ptr, bh, bh // Hq, Lq, Lkv,
        BLOCK_Q, BLOCK_KV, CHUNK,
    )  # fmt: skip
    c_struct = tl.load(c_struct_ptr + bh)
    coverage = tl.load(coverage_ptr + bh)
    share = tl.load(share_ptr + bh)
    multiple = tl.maximum(share, 0.0)
    route = tl.where(share < 0, ALL_BLOCKS, ESTIMATE)
    store_stats(
        out_ptr, bh, kept, visible, c_struct, coverage, multiple, route, COLUMNS, NOT_MEASURED
    )
