"""Attention over kept blocks, with pooled keys and values in place of the dropped ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from selection import BLOCK_Q, HIDDEN, Selection, matmul
from torch import Tensor

# Logits made at once.
CHUNK_ELEMENTS = 1 << 27


@dataclass(slots=True)
class Sums:
    """Counts of one pass over a model: key tokens per query block, and mass of rows."""

    kept: float = 0.0
    visible: float = 0.0
    pooled: float = 0.0
    mass: float = 0.0
    rows: float = 0.0

    def row(self) -> dict[str, float]:
        """density: kept key tokens over visible ones; cost: with the pooled keys; recall: mass."""
        return {
            "density": self.kept / self.visible,
            "cost": (self.kept + self.pooled) / self.visible,
            "recall": self.mass / self.rows,
        }


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, chosen: Selection, sums: Sums, every: int = 1
) -> Tensor:
    """[Hq, L, D]; adds to sums. q [Hq, L, D], k and v [Hkv, L, D].

    every: only each so many query blocks, those of sampled_rows; the density is of all.
    """
    Hq, L, _ = q.shape
    group = Hq // k.shape[0]
    J = chosen.keep.shape[-1]
    block, pooled = L // J, chosen.pooled
    positions = torch.arange(L, device=q.device)
    blocks = torch.arange(J, device=q.device) * block
    step = max(CHUNK_ELEMENTS // (Hq * L) // BLOCK_Q, 1) * BLOCK_Q
    firsts = range(0, L, step)
    if every > 1:
        step = BLOCK_Q
        firsts = range(every // 2 * step, L, every * step)
    parts, mass = [], q.new_zeros(())
    for first in firsts:
        end = min(first + step, L)
        x, j = q[:, first:end], -(-end // block)
        logits = matmul(x, k[:, :end].mT, group).mul_(scale)
        logits.masked_fill_(positions[:end] > positions[first:end, None], HIDDEN)
        top = logits.amax(-1, keepdim=True)
        p = logits.sub_(top).exp_()
        total = p.sum(-1, keepdim=True)
        keep = chosen.keep[:, first // BLOCK_Q : -(-end // BLOCK_Q), :j]  # [Hq, n, j]
        p.view(Hq, -1, BLOCK_Q, j, block).mul_(keep[:, :, None, :, None])
        z = p.sum(-1, keepdim=True)
        mass += (z / total).sum()
        out = matmul(p, v[:, :end], group)
        if pooled is not None:
            n = end // pooled.size
            visible = blocks[:j] + block <= positions[first:end:BLOCK_Q, None]
            dropped = (~keep & visible).repeat_interleave(block // pooled.size, -1)
            c = (pooled.logits(x, scale)[:, :, :n] - top).clamp_(max=60).exp_()
            c.view(Hq, -1, BLOCK_Q, n).mul_(dropped[:, :, None])
            out += matmul(c, pooled.value[:, :n], group)
            z = z + c.sum(-1, keepdim=True)
        parts.append(out / z)
    Nq = L // BLOCK_Q
    ends = (torch.arange(Nq) + 1) * BLOCK_Q
    visible_tokens = float(Hq * ends.sum())
    kept = float(chosen.keep.sum()) * block
    sums.kept += kept
    sums.visible += visible_tokens
    if pooled is not None:
        sums.pooled += (visible_tokens - kept) / pooled.size
    sums.mass += float(mass)
    sums.rows += sum(part.shape[1] for part in parts) * Hq
    return torch.cat(parts, 1)


def sampled_rows(x: Tensor, every: int) -> Tensor:
    """Of x [H, L, D] the query blocks every // 2, every // 2 + every, ..."""
    return x.unflatten(1, (-1, BLOCK_Q))[:, every // 2 :: every].flatten(1, 2)
