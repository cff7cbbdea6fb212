"""Statistics of a call under a policy without an audit: one row of STAT_NAMES per head.

Oracle: reference.Selection.stats. Reads vectors of Nq and Nkv per head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from crisp_flex.routing.guards import NOT_MEASURED, ROUTE_ALL_BLOCKS, ROUTE_VERTICAL_SLASH
from crisp_flex.routing.kernels.block_counts import block_counts, store_stats
from crisp_flex.routing.kernels.compact import Lists
from crisp_flex.routing.kernels.kept import Rule
from crisp_flex.routing.kernels.layout import Layout
from crisp_flex.routing.params import STAT_NAMES, RouteParams


def kept_stats(
    lists: Lists,
    c_struct: Tensor | None,
    covered: Tensor | None,
    rule: Rule,
    layout: Layout,
    params: RouteParams,
) -> Tensor:
    """[B, Hq, len(STAT_NAMES)] fp32, in the order of STAT_NAMES.

    Args:
        lists: Of kept_lists.
        c_struct: [B, Hq] fp32; None for policy "dense".
        covered: Of proxy_coverage; None for policy "dense".
        rule: Of the policy.
        layout: Of this call.
        params: max_uncovered.
    """
    x = layout
    out = lists.counts.new_empty((x.B, x.Hq, len(STAT_NAMES)), dtype=torch.float32)
    _stats_kernel[(x.B * x.Hq,)](
        lists.counts,
        lists.full_counts,
        c_struct,
        covered,
        rule.route,
        out,
        x.first_valid,
        x.q_offset,
        x.Hq,
        x.Lq,
        x.Lkv,
        params.max_uncovered,
        BLOCK_Q=x.block_q,
        BLOCK_KV=x.block_kv,
        COLUMNS=len(STAT_NAMES),
        NOT_MEASURED=NOT_MEASURED,
        LINES=ROUTE_VERTICAL_SLASH,
        ALL_BLOCKS=ROUTE_ALL_BLOCKS,
        CHUNK=min(1024, triton.next_power_of_2(max(x.Nq, x.Nkv))),
    )
    return out


@triton.jit(do_not_specialize=["Hq", "Lq", "Lkv"])
def _stats_kernel(
    counts_ptr,
    full_counts_ptr,
    c_struct_ptr,
    covered_ptr,
    route_ptr,
    out_ptr,
    first_valid_ptr,
    offset_ptr,
    Hq,
    Lq,
    Lkv,
    max_uncovered,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    COLUMNS: tl.constexpr,
    NOT_MEASURED: tl.constexpr,
    LINES: tl.constexpr,
    ALL_BLOCKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (B * Hq,)."""
    bh = tl.program_id(0).to(tl.int64)  # before the first multiply
    kept, visible = block_counts(
        counts_ptr, full_counts_ptr, first_valid_ptr, offset_ptr, bh, bh // Hq, Lq, Lkv,
        BLOCK_Q, BLOCK_KV, CHUNK,
    )  # fmt: skip
    c_struct = tl.full([], NOT_MEASURED, tl.float32)
    coverage = tl.full([], 1.0, tl.float32)
    route = tl.full([], ALL_BLOCKS, tl.float32)
    if covered_ptr is not None:
        c_struct = tl.load(c_struct_ptr + bh)
        coverage = tl.load(covered_ptr + bh * 2)
        chosen = tl.full([], LINES, tl.float32)
        if route_ptr is not None:
            chosen = tl.load(route_ptr + bh)
        short = ~(1 - coverage <= max_uncovered)  # as in kept_lists
        route = tl.where(short, route, chosen)
        coverage = tl.where(short, tl.load(covered_ptr + bh * 2 + 1), coverage)
    multiple = tl.full([], NOT_MEASURED, tl.float32)
    store_stats(
        out_ptr, bh, kept, visible, c_struct, coverage, multiple, route, COLUMNS, NOT_MEASURED
    )
