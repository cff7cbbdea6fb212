"""policy="hybrid" on the GPU: pool -> probe -> audit -> select -> stats, on the query's device.

Oracle: reference.route. No read-back, no atomics: two runs give the same bits.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from crisp_flex.routing.kernels.audit import audit
from crisp_flex.routing.kernels.layout import Layout
from crisp_flex.routing.kernels.masses import masses
from crisp_flex.routing.kernels.pool import pool_split
from crisp_flex.routing.kernels.probe import probe
from crisp_flex.routing.kernels.ranges import stage
from crisp_flex.routing.kernels.select import select
from crisp_flex.routing.kernels.stats import stats
from crisp_flex.routing.params import RouteParams

# Rows of the audit that one program reduces.
MOST_AUDIT_ROWS = 64
_BLOCK_SIZES = (64, 128)
# The probe's tiles at D 256: 130 KiB by offline compilation for sm_80, 192 for sm_90; sm_80 has 163
# KiB for a program, sm_86, sm_89 and sm_120 have 99.
_WIDE_HEADS_SHARED = 160 * 1024


def supports(query: Tensor, key: Tensor, params: RouteParams) -> bool:
    """Whether the kernels take this call; the reference takes all."""
    return (
        params.policy == "hybrid"
        and params.coverage_reduce in ("mean", "min")
        and params.coverage_min == 0
        and 1 <= params.audit_rows <= MOST_AUDIT_ROWS
        and takes(query, key, params)
    )


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may have; no limit where nothing is launched."""
    if device.type != "cuda":
        return _WIDE_HEADS_SHARED
    properties: Any = torch.cuda.get_device_properties(device)  # its stub lacks this field
    return int(properties.shared_memory_per_block_optin)


def takes(query: Tensor, key: Tensor, params: RouteParams) -> bool:
    """Whether the stages that all policies share take these tensors."""
    return (
        params.block_q in _BLOCK_SIZES
        and params.block_kv in _BLOCK_SIZES
        and query.dtype in (torch.float16, torch.bfloat16)
        and key.dtype == query.dtype
        and 16 <= query.shape[3] <= 256
        and query.shape[1] % key.shape[1] == 0
        and query.numel() > 0
        and (query.shape[3] <= 128 or _shared_bytes(query.device) >= _WIDE_HEADS_SHARED)
        # the largest dot is the largest logit
        and params.scale > 0
    )


def route(
    query: Tensor,
    key: Tensor,
    key_valid: Tensor | None,
    params: RouteParams,
    q_offset: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Block lists of sparse causal attention, in the layout of FlexAttention's BlockMask.

    Args:
        query: [B, Hq, Lq, D], any strides; query i stands at position i + q_offset.
        key: [B, Hkv, Lkv, D], Hq a multiple of Hkv, Lkv >= Lq, any strides.
        key_valid: [B, Lkv] bool, False for padding; None if every key is valid.
        params: Numbers of the policy "hybrid"; see supports.
        q_offset: [1] integer, on the same device, in [0, Lkv - Lq]; None is Lkv - Lq.

    Returns:
        kv_num_blocks: [B, Hq, Nq] int32, partial blocks per row.
        kv_buffer: [B, Hq, Nq, P + Nkv] int32 with P = partial_slots(...): the partial
            blocks ascending from slot 0, the full ones ascending from slot P, undefined elsewhere.
        full_kv_num_blocks: [B, Hq, Nq] int32, full blocks per row.
        stats: [B, Hq, len(STAT_NAMES)] fp32; see reference.Selection.
    """
    with torch.cuda.device_of(query):
        layout = Layout.of(query, key, key_valid, params, q_offset)
        with stage("pool"):
            mean_query, keys = pool_split(query, key, layout)
        with stage("probe"):
            sums = probe(query, key, layout, scale=params.scale, audit_rows=params.audit_rows)
            measured = masses(sums, layout, audit_rows=params.audit_rows)
            del sums
        with stage("audit"):
            audited = audit(mean_query, keys, measured, layout, scale=params.scale)
        with stage("select"):
            lists = select(mean_query, keys, audited, layout, params)
        with stage("stats"):
            statistics = stats(lists, measured.c_struct, audited, layout, params)
    return lists.counts, lists.buffer, lists.full_counts, statistics
