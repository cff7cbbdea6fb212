"""Stage `router` of policy "crisp" on the GPU: the route of each head.

Oracle: policies.crisp._takes_lines. Sources: CRISP, arXiv 2609.01925 ("c_struct"); FlexPrefill,
arXiv 2502.20766 ("jsd"). "jsd" reads the pooled keys of a head twice, bound by latency.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from crisp_flex.routing.guards import ROUTE_ESTIMATE, ROUTE_VERTICAL_SLASH
from crisp_flex.routing.kernels.layout import Layout
from crisp_flex.routing.kernels.lines import vertical_mass
from crisp_flex.routing.kernels.masses import Masses
from crisp_flex.routing.kernels.positions import (
    WINDOW,
    bounds_of,
    first_keys,
    kv_head_of,
    proxy_range,
    query_span,
)
from crisp_flex.routing.kernels.tile import LOG2_E
from crisp_flex.routing.params import RouteParams

# Square root of the Jensen-Shannon divergence below which the pooled estimate is trusted.
JSD_THRESHOLD = 0.1
ROUTERS = ("c_struct", "jsd", "vs", "pe")

# Pooled keys at once.
TILE_ELEMENTS = 64 * 128
NUM_WARPS = 8


def route_heads(
    query: Tensor, mean_key: Tensor, measured: Masses, layout: Layout, params: RouteParams
) -> Tensor:
    """[B, Hq] fp32: ROUTE_VERTICAL_SLASH or ROUTE_ESTIMATE.

    Args:
        query: [B, Hq, Lq, D], any strides.
        mean_key: [B, Hkv, Nkv, D] fp32, contiguous.
        measured: Masses of the proxy rows alone.
        layout: Of this call.
        params: router, tau and scale.
    """
    x = layout
    route = torch.empty((x.B, x.Hq), dtype=torch.float32, device=query.device)
    _router_kernel[(x.B * x.Hq,)](
        query,
        mean_key,
        measured.mass,
        measured.c_struct,
        route,
        x.first_valid,
        x.bounds,
        x.q_offset,
        *query.stride(),
        x.Hq,
        x.Hkv,
        x.Lq,
        x.Lkv,
        params.scale,
        params.tau,
        D=x.D,
        BLOCK_D=x.BLOCK_D,
        BLOCK_KV=x.block_kv,
        PLANES=x.planes,
        ROUTER=params.router,
        JSD_THRESHOLD=JSD_THRESHOLD,
        LINES=ROUTE_VERTICAL_SLASH,
        ESTIMATE=ROUTE_ESTIMATE,
        BLOCK_J=max(TILE_ELEMENTS // x.BLOCK_D, 16),
        num_warps=NUM_WARPS,
    )
    return route


@triton.jit(do_not_specialize=["Hq", "Hkv", "Lq", "Lkv"])
def _router_kernel(
    q_ptr,
    mean_k_ptr,
    mass_ptr,
    c_struct_ptr,
    route_ptr,
    first_valid_ptr,
    bounds_ptr,
    offset_ptr,
    stride_qb,
    stride_qh,
    stride_ql,
    stride_qd,
    Hq,
    Hkv,
    Lq,
    Lkv,
    scale,
    tau,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    PLANES: tl.constexpr,
    ROUTER: tl.constexpr,
    JSD_THRESHOLD: tl.constexpr,
    LINES: tl.constexpr,
    ESTIMATE: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    """Grid (B * Hq,)."""
    bh = tl.program_id(0).to(tl.int64)  # before the first multiply
    route = tl.full([], ESTIMATE, tl.float32)
    if ROUTER == "vs":
        route = tl.full([], LINES, tl.float32)
    elif ROUTER == "c_struct":
        route = tl.where(tl.load(c_struct_ptr + bh) >= tau, LINES, route)
    elif ROUTER == "jsd":
        b, kv_head = kv_head_of(bh, Hq, Hkv)
        Nkv = tl.cdiv(Lkv, BLOCK_KV)
        offset, reach = query_span(offset_ptr, Lq, Lkv)
        start, end = bounds_of(bounds_ptr, b, reach)
        q_ptr += b * stride_qb + (bh % Hq) * stride_qh
        mean_q = _proxy_mean(q_ptr, stride_ql, stride_qd, start, end, offset, Lq, D, BLOCK_D)
        jsd = _divergence(
            mean_q * (scale * LOG2_E), mean_k_ptr + kv_head * Nkv * D,
            mass_ptr + bh * PLANES * Nkv, first_valid_ptr, b, Nkv, reach,
            D, BLOCK_D, BLOCK_KV, PLANES, BLOCK_J,
        )  # fmt: skip
        # a divergence of NaN becomes 0 here: the pooled estimate, as in the reference
        route = tl.where(tl.sqrt(tl.maximum(jsd, 0.0)) >= JSD_THRESHOLD, LINES, route)
    tl.store(route_ptr + bh, route)


@triton.jit
def _proxy_mean(
    q_ptr, stride_ql, stride_qd, start, end, offset, Lq, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """[BLOCK_D] fp32: mean of the proxy rows of a head, 0 if there are none."""
    first, lo, hi = proxy_range(start, end, offset, Lq)
    d = tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_D], tl.float32)
    for i in range(0, WINDOW, 32):
        position = first + i + tl.arange(0, 32)
        counts = (position >= lo) & (position < hi)
        q_ptrs = q_ptr + (position - offset).to(tl.int64)[:, None] * stride_ql
        rows = tl.load(
            q_ptrs + d[None, :] * stride_qd, mask=counts[:, None] & (d < D)[None, :], other=0.0
        )
        total += tl.sum(rows.to(tl.float32), 0)
    return total / tl.maximum(hi - lo, 1).to(tl.float32)


@triton.jit
def _divergence(
    mean_q,
    mean_k_ptr,
    proxy_ptr,
    first_valid_ptr,
    b,
    Nkv,
    reach,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    PLANES: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    """Jensen-Shannon divergence, in nats, of the proxy rows' mass and the mean query's estimate.

    mean_q [BLOCK_D] includes the scale, in units of log2.
    """
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    for j in range(0, Nkv, BLOCK_J):
        blk = j + tl.arange(0, BLOCK_J)
        filled = first_keys(first_valid_ptr, b, blk, Nkv, BLOCK_KV) < reach
        logits = _row_logits(mean_q, mean_k_ptr, blk, filled, D, BLOCK_D)
        new_top = tl.maximum(top, tl.max(logits, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp2(top - base) + tl.sum(tl.exp2(logits - base), 0)
        top = new_top
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.where(total > 0, total, 1.0)
    divergence = tl.zeros([BLOCK_J], tl.float32)
    for j in range(0, Nkv, BLOCK_J):
        blk = j + tl.arange(0, BLOCK_J)
        filled = first_keys(first_valid_ptr, b, blk, Nkv, BLOCK_KV) < reach
        logits = _row_logits(mean_q, mean_k_ptr, blk, filled, D, BLOCK_D)
        p = tl.exp2(logits - base) / total
        q = vertical_mass(proxy_ptr, blk, Nkv, PLANES)
        mean = (p + q) / 2
        divergence += _x_log2(p, p) + _x_log2(q, q) - _x_log2(p, mean) - _x_log2(q, mean)
    return tl.sum(divergence, 0) / 2 / LOG2_E


@triton.jit
def _x_log2(x, y):
    """x log2(y), 0 where x is 0, NaN where x is."""
    return tl.where(x <= 0, 0.0, x * tl.log2(tl.maximum(y, 1.2e-38)))


@triton.jit
def _row_logits(mean_q, mean_k_ptr, blk, there, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """[BLOCK_J]: mean_q [BLOCK_D] times pooled keys blk, -inf where not there."""
    d = tl.arange(0, BLOCK_D)
    mean_k = tl.load(
        mean_k_ptr + blk[:, None] * D + d[None, :],
        mask=there[:, None] & (d < D)[None, :],
        other=0.0,
    )
    return tl.where(there, tl.sum(mean_k * mean_q[None, :], 1), float("-inf"))
