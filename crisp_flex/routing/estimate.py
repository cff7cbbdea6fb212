"""Stage `estimate`: the attention that each block's mean query pays to every key, by key block.

Unlike the map between pooled tokens (`pool`) it looks at every key, so that one key that stands out
of its block counts in full. A chunk of rows and heads at a time, so that no [Nq, Lkv] tensor of all
heads exists.
"""

from __future__ import annotations

import torch
from torch import Tensor

from crisp_flex.routing.geometry import Geometry
from crisp_flex.routing.probe import CHUNK_ELEMENTS, block_sums, probabilities

# Most rows made at once: the fewer, the less is made of what lies past the diagonal.
_CHUNK_ROWS = 64


def estimate(mean_query: Tensor, key: Tensor, geometry: Geometry, scale: float) -> Tensor:
    """Mass of each block in the softmax of a block's mean query over the keys that it sees.

    A row sees the valid keys up to the last position of its query block.

    Args:
        mean_query: [B, Hq, Nq, D] fp32, as `pool` gives it; rounded to the dtype of key, so that
            tensor cores multiply the very same numbers.
        key: [B, Hkv, Lkv, D], any float dtype, Hq a multiple of Hkv.
        geometry: Of this call.
        scale: Factor on the logits.

    Returns:
        [B, Hq, Nq, Nkv] fp32: rows sum to 1, or to 0 where nothing is visible. A row whose mean
        query, or one of whose visible keys, is not finite is NaN where it is visible.
    """
    g = geometry
    mean_query = mean_query.to(key.dtype).float()
    chunks = []
    of_one_row = key.shape[0] * (mean_query.shape[1] // key.shape[1]) * g.Lkv
    step = min(max(CHUNK_ELEMENTS // of_one_row, 1), _CHUNK_ROWS)
    for first in range(0, g.Nq, step):
        rows = torch.arange(first, min(first + step, g.Nq), device=key.device)
        key_limit = g.Lkv
        if isinstance(g.offset, int):
            key_limit = min((first + len(rows)) * g.block_q + g.offset, g.Lkv)
        last = rows * g.block_q + (g.block_q - 1) + g.offset  # past the last key if ragged
        hidden = torch.arange(key_limit, device=key.device) > last[:, None]
        if g.key_valid is not None:
            hidden = hidden | ~g.key_valid[:, None, None, :key_limit]
        # an Inf may give some rows no mass and others all of it, as in `pool`
        probs = probabilities(
            mean_query[:, :, rows] * scale, key[:, :, :key_limit], hidden, inf_is_nan=True
        )
        chunks.append(torch.cat([block_sums(x, g) for x in probs], 1))
    return torch.cat(chunks, 2).masked_fill(~g.visible, 0.0)
