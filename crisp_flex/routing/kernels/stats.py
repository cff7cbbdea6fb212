"""Statistics of a routed call on the GPU: one row of STAT_NAMES per batch and query head.

Oracle: reference.Selection.stats. Reads vectors of Nq and Nkv per head.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from crisp_flex.routing.guards import NOT_MEASURED, ROUTE_ALL_BLOCKS, ROUTE_BOTH_VIEWS
from crisp_flex.routing.kernels.audit import COVERAGE_MARGIN, Audit
from crisp_flex.routing.kernels.block_counts import block_counts, store_stats
from crisp_flex.routing.kernels.compact import Lists
from crisp_flex.routing.kernels.layout import Layout
from crisp_flex.routing.kernels.levels import MULTIPLES
from crisp_flex.routing.kernels.lines import choose_level
from crisp_flex.routing.params import STAT_NAMES, RouteParams


def stats(
    lists: Lists,
    c_struct: Tensor,
    audited: Audit,
    layout: Layout,
    params: RouteParams,
) -> Tensor:
    """[B, Hq, len(STAT_NAMES)] fp32, in the order of STAT_NAMES."""
    x = layout
    out = c_struct.new_empty((x.B, x.Hq, len(STAT_NAMES)))
    audits = audited.coverage.shape[2]
    _stats_kernel[(x.B * x.Hq,)](
        lists.counts,
        lists.full_counts,
        c_struct,
        audited.coverage,
        out,
        x.first_valid,
        x.q_offset,
        x.Hq,
        x.Lq,
        x.Lkv,
        params.coverage + COVERAGE_MARGIN,
        BLOCK_Q=x.block_q,
        BLOCK_KV=x.block_kv,
        MULTIPLES=MULTIPLES,
        AUDITS=audits,
        AUDIT_SLOTS=triton.next_power_of_2(audits),
        MINIMUM=params.coverage_reduce == "min",
        COLUMNS=len(STAT_NAMES),
        BOTH_VIEWS=ROUTE_BOTH_VIEWS,
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
    coverage_ptr,
    out_ptr,
    first_valid_ptr,
    offset_ptr,
    Hq,
    Lq,
    Lkv,
    target,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    MULTIPLES: tl.constexpr,
    AUDITS: tl.constexpr,
    AUDIT_SLOTS: tl.constexpr,
    MINIMUM: tl.constexpr,
    COLUMNS: tl.constexpr,
    BOTH_VIEWS: tl.constexpr,
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
    chosen, coverage = choose_level(
        coverage_ptr + bh * AUDITS * 8, target, AUDITS, AUDIT_SLOTS, MINIMUM
    )
    multiple = tl.full([], 0.0, tl.float32)
    for i in tl.static_range(7):
        multiple = tl.where(chosen == i + 1, MULTIPLES[i], multiple)
    c_struct = tl.load(c_struct_ptr + bh)
    route = tl.where(chosen == 0, ALL_BLOCKS, BOTH_VIEWS)
    store_stats(
        out_ptr, bh, kept, visible, c_struct, coverage, multiple, route, COLUMNS, NOT_MEASURED
    )
