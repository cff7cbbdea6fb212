"""Stage `pool`: mean query and key of each block, and the attention map between the means."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from crisp_flex.routing.geometry import Geometry


def pool(query: Tensor, key: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """Mean query and key of each block over the valid tokens there; zero where there is none.

    A block with NaN or Inf in it has the mean NaN there.

    Args:
        query: [B, Hq, Lq, D], any float dtype.
        key: [B, Hkv, Lkv, D].
        geometry: Of this call.

    Returns:
        [B, Hq, Nq, D] and [B, Hkv, Nkv, D] fp32.
    """
    g = geometry
    query_valid = None
    if g.key_valid is not None:
        positions = torch.arange(g.Lq, device=query.device) + g.offset
        query_valid = (positions >= g.start[:, None]) & (positions < g.end[:, None])
    return _block_mean(query, query_valid, g.block_q), _block_mean(key, g.key_valid, g.block_kv)


def pooled_map(mean_query: Tensor, mean_key: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Row softmax of the map between pooled tokens over the visible blocks.

    Args:
        mean_query: [B, Hq, R, D] fp32.
        mean_key: [B, Hkv, Nkv, D] fp32.
        visible: [B or 1, 1, R, Nkv] bool.
        scale: Factor on the logits.

    Returns:
        Pbar [B, Hq, R, Nkv] fp32: rows sum to 1, or to 0 where nothing is visible. A row whose
        mean query, or one of whose visible mean keys, is NaN is NaN where it is visible.
    """
    Hkv = mean_key.shape[1]
    B, Hq, R, D = mean_query.shape
    grouped = (mean_query * scale).view(B, Hkv, Hq // Hkv, R, D)
    logits = (grouped @ mean_key[:, :, None].mT).flatten(1, 2)
    logits = logits.masked_fill(~visible, torch.finfo(torch.float32).min)
    return logits.softmax(-1).masked_fill(~visible, 0.0)


def _block_mean(x: Tensor, valid: Tensor | None, block: int) -> Tensor:
    """[B, H, N, D] fp32 mean of x [B, H, L, D] per block of tokens, over valid [B, L] if given."""
    L = x.shape[2]
    N = -(-L // block)
    tail = N * block - L
    if valid is None:
        valid = torch.ones(1, L, dtype=torch.bool, device=x.device)
    else:
        # where, not a product: what stands in padding may be NaN
        x = torch.where(valid[:, None, :, None], x, 0.0)
    if tail:
        x = pad(x, (0, 0, 0, tail))
    total = x.reshape(*x.shape[:2], N, block, -1).sum(3, dtype=torch.float32)
    tokens = pad(valid, (0, tail)).view(-1, N, block).sum(-1)
    mean = total / tokens.clamp(min=1)[:, None, :, None]
    # an Inf may give some rows no mass and others all of it, which a mean query cannot tell apart
    return mean + (mean - mean)
