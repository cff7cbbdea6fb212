"""policy="xattention": blocks by sums of strided antidiagonals, a share of each row kept.

Source: XAttention, arXiv 2503.16428, Algorithm 1. Tokens are grouped by stride S; a group pair's
logit is sum over a < S of q[S - 1 - a] . k[a], times scale / S. Fixed threshold for all heads.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from crisp_flex.routing.geometry import Geometry
from crisp_flex.routing.guards import ROUTE_ESTIMATE, Choice, choose_or_keep_all
from crisp_flex.routing.lines import always
from crisp_flex.routing.params import RouteParams
from crisp_flex.routing.probe import probe
from crisp_flex.routing.top_mass import top_mass


def select(query: Tensor, key: Tensor, geometry: Geometry, params: RouteParams) -> Choice:
    """The largest estimated blocks of each row until they hold params.threshold of its mass."""
    measured = probe(query, key, geometry, scale=params.scale, audit_rows=0)
    mass = block_scores(query, key, geometry, scale=params.scale, stride=params.stride)
    keep = (top_mass(mass, params.threshold) | always(geometry)) & geometry.visible
    return choose_or_keep_all(
        keep,
        measured,
        geometry,
        route=torch.full_like(measured.c_struct, ROUTE_ESTIMATE),
        max_uncovered=params.max_uncovered,
    )


def block_scores(query: Tensor, key: Tensor, g: Geometry, *, scale: float, stride: int) -> Tensor:
    """[B, Hq, Nq, Nkv] fp32: softmax over key groups, summed per block and over query groups.

    A query block at a time, so that no more than [Hq, block_q / stride, Lkv / stride] is alive.
    Tokens of padding count as zero; a group with none but such tokens is not seen.
    """
    B, Hq, _, D = query.shape
    Hkv, device = key.shape[1], query.device
    positions = torch.arange(g.Lq, device=device) + g.offset
    asked = (positions >= g.start[:, None]) & (positions < g.end[:, None])  # [B', Lq]
    valid = g.key_valid
    if valid is None:
        valid = torch.ones(1, g.Lkv, dtype=torch.bool, device=device)
    keys = _groups(key, valid, g.Nkv * g.block_kv, stride).flatten(-2)
    tail = g.Nkv * g.block_kv - g.Lkv
    tokens = torch.arange(g.Nkv * g.block_kv, device=device)
    first = torch.where(pad(valid, (0, tail)), tokens, tokens.numel())
    first = first.view(-1, tokens.numel() // stride, stride).amin(-1)  # [B', Gk]
    rows = []
    for start in range(0, g.Lq, g.block_q):
        part = slice(start, min(start + g.block_q, g.Lq))
        queries = _groups(query[:, :, part], asked[:, part], g.block_q, stride)
        queries = queries.flip(-2).flatten(-2)  # [B, Hq, Gq, stride * D]
        counts = pad(asked[:, part], (0, start + g.block_q - part.stop))
        counts = counts.view(-1, g.block_q // stride, stride).any(-1)  # [B', Gq]
        last = torch.arange(start + stride - 1, start + g.block_q, stride, device=device)
        last = last.clamp(max=g.Lq - 1) + g.offset
        seen = (first[:, None] <= last[:, None])[:, None]  # [B', 1, Gq, Gk]
        grouped = queries.view(B, Hkv, Hq // Hkv, -1, stride * D) * (scale / stride)
        logits = (grouped @ keys[:, :, None].mT).flatten(1, 2)
        logits = logits.masked_fill(~seen, torch.finfo(torch.float32).min)
        probs = logits.softmax(-1).masked_fill(~(seen & counts[:, None, :, None]), 0.0)
        rows.append(probs.sum(2).view(B, Hq, g.Nkv, -1).sum(-1))
    return torch.stack(rows, 2)


def _groups(x: Tensor, valid: Tensor, length: int, stride: int) -> Tensor:
    """[B, H, length / stride, stride, D] fp32 of x [B, H, L, D], zero where not valid [B', L]."""
    # where, not a product: what stands in padding may be NaN
    x = torch.where(valid[:, None, :, None], x, 0.0).float()
    x = pad(x, (0, 0, 0, length - x.shape[2]))
    return x.view(*x.shape[:2], -1, stride, x.shape[3])
