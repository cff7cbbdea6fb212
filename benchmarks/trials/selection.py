"""Which blocks a variant keeps: estimates, thresholds, and the audit that sets their depth.

Eager evaluation code for one sequence whose length is a multiple of 128. Shapes: q [Hq, L, D], k
and v [Hkv, L, D], all fp32; Nq query blocks of 128, J key blocks, G grid values, m audit rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor
from variants import Variant

from crisp_flex.routing.geometry import Geometry
from crisp_flex.routing.lines import always, cover, select_lines
from crisp_flex.routing.probe import probe

BLOCK_Q = 128
HIDDEN = torch.finfo(torch.float32).min


@dataclass(frozen=True, slots=True)
class Pooled:
    """What stands for dropped keys: means [Hkv, L / size, D], and the keys' variance or None."""

    size: int
    key: Tensor
    value: Tensor
    variance: Tensor | None

    def logits(self, q: Tensor, scale: float) -> Tensor:
        """log of the estimated sum of exp over each pooled group, [Hq, R, L / size]."""
        group = q.shape[0] // self.key.shape[0]
        out = matmul(q, self.key.mT, group) * scale
        if self.variance is not None:
            out = out + matmul(q * q, self.variance.mT, group) * (0.5 * scale**2)
        return out + torch.log(torch.tensor(float(self.size)))


@dataclass(frozen=True, slots=True)
class Selection:
    """keep [Hq, Nq, J] bool, the coverage of the audit rows [Hq], pooled keys or None."""

    keep: Tensor
    quality: Tensor
    pooled: Pooled | None


def matmul(x: Tensor, y: Tensor, group: int) -> Tensor:
    """x [Hq, R, C] @ y [Hkv, C, N], each y for group heads of x."""
    Hkv, R = y.shape[0], x.shape[1]
    return (x.reshape(Hkv, group * R, -1) @ y).view(Hkv * group, R, -1)


def pool(x: Tensor, size: int) -> Tensor:
    """Means of size tokens: [H, L, D] to [H, L / size, D]."""
    return x.unflatten(1, (-1, size)).mean(2)


def pooled_of(k: Tensor, v: Tensor, v_: Variant) -> Pooled | None:
    """The stand-ins of dropped keys."""
    if not v_.correct:
        return None
    size = min(v_.correct, v_.block)
    variance = k.unflatten(1, (-1, size)).var(2, correction=0) if v_.second else None
    return Pooled(size, pool(k, size), pool(v, size), variance)


def estimate(q: Tensor, k: Tensor, v: Tensor, scale: float, v_: Variant) -> Tensor:
    """[Hq, Nq, J] fp32: estimated mass of each block, rows sum to 1."""
    size_k, size_q = v_.pool_k or v_.block, v_.pool_q
    group = q.shape[0] // k.shape[0]
    mean_q, mean_k = pool(q, size_q), pool(k, size_k)
    logits = matmul(mean_q, mean_k.mT, group) * scale
    if v_.spread:
        variance = k.unflatten(1, (-1, size_k)).var(2, correction=0)
        logits = logits + matmul(mean_q**2, variance.mT, group) * (0.5 * scale**2)
    first_k = torch.arange(mean_k.shape[1], device=q.device) * size_k
    last_q = (torch.arange(mean_q.shape[1], device=q.device) + 1) * size_q - 1
    hidden = first_k > last_q[:, None]
    mass = logits.masked_fill(hidden, HIDDEN).softmax(-1).unflatten(-1, (-1, v_.block // size_k))
    by_block = mass.sum(-1).unflatten(1, (-1, BLOCK_Q // size_q))
    by_row = by_block.amax(2) if v_.over_q == "max" else by_block.mean(2)
    if v_.value:
        distance = (pool(v, v_.block) - v.mean(1, keepdim=True)).norm(dim=-1)
        by_row = by_row * distance.repeat_interleave(group, 0)[:, None]
    if v_.share:
        by_row = by_row.unflatten(0, (-1, group)).mean(1).repeat_interleave(group, 0)
    return by_row / by_row.sum(-1, keepdim=True)


def thresholded(mass: Tensor, g: Geometry, v_: Variant) -> Tensor:
    """[G, Hq, Nq, J] bool: blocks above each grid value's threshold."""
    grid = torch.tensor(v_.grid, device=mass.device)[:, None, None, None]
    if v_.rule == "top-p":
        ordered, index = mass.sort(dim=-1, descending=True)
        before = ordered.cumsum(-1) - ordered
        rest = torch.zeros_like(mass).scatter(-1, index, 1 - before)
        return rest > grid
    if v_.rule == "common":
        return mass > grid / mass.shape[-1]
    blocks = torch.arange(mass.shape[-1], device=mass.device)
    ends = (blocks == 0) | (blocks == g.last_block[0, 0, :, None])
    n = g.visible_blocks[0, 0, :, None]
    floor = mass.masked_fill(ends, 0.0).sum(-1, keepdim=True) / (n - 2).clamp(min=1)
    return mass > grid * floor.maximum(1 / (1024 * n))


def candidates(q: Tensor, k: Tensor, v: Tensor, scale: float, v_: Variant) -> Tensor:
    """[G + 1, Hq, Nq, J] bool: what each grid value keeps; the last one is all visible blocks."""
    sizes = SimpleNamespace(block_q=BLOCK_Q, block_kv=v_.block)
    g = Geometry.of(q[None], k[None], None, sizes)
    keep = thresholded(estimate(q, k, v, scale, v_), g, v_) | always(g)
    if v_.lines:
        measured = probe(q[None], k[None], g, scale=scale, audit_rows=0)
        for i, value in enumerate(v_.grid):
            multiple = v_.lines if v_.fixed_lines else v_.lines * value
            if v_.line_grid:
                multiple = v_.line_grid[i]
            lines = cover(select_lines(measured, g, multiple, k_min=0), g)[0]
            if v_.share:
                group = q.shape[0] // k.shape[0]
                lines = lines.unflatten(0, (-1, group)).any(1).repeat_interleave(group, 0)
            keep[i] |= lines
    return torch.cat([keep & g.visible, g.visible.expand(1, *keep.shape[1:])])


def audit_rows(Nq: int, count: int) -> list[int]:
    """The query blocks at 1/count .. 1 of the length."""
    return sorted({-(-Nq * (i + 1) // count) - 1 for i in range(count)})


def quality_of(keep, q, k, v, scale, v_: Variant, rows: list[int], pooled: Pooled | None):
    """(quality [G + 1, Hq, m], weight [Hq, m]) of candidates on the audit rows.

    measure mass: the exact mass kept, weight 1. measure error: 1 - squared error of the output over
    weight, with weight the squared norm of the exact output, of the head or the mean of all heads.
    """
    qualities, weights = [], []
    group = q.shape[0] // k.shape[0]
    for I in rows:
        end = (I + 1) * BLOCK_Q
        step = BLOCK_Q // v_.sample
        x = q[:, I * BLOCK_Q + step - 1 : end : step]
        logits = matmul(x, k[:, :end].mT, group) * scale
        positions = torch.arange(end, device=q.device)
        hidden = positions > positions[-BLOCK_Q:][step - 1 :: step, None]
        logits = logits.masked_fill_(hidden, HIDDEN)
        top = logits.amax(-1, keepdim=True)
        p = (logits - top).exp_().unflatten(-1, (-1, v_.block))  # [Hq, 128, j, block]
        z = p.sum(-1)  # [Hq, 128, j]
        kept = keep[:, :, I, : z.shape[-1]].float()  # [G + 1, Hq, j]
        if v_.measure == "mass":
            mass = (z / z.sum(-1, keepdim=True)).mean(1)
            qualities.append((kept * mass).sum(-1))
            weights.append(torch.ones_like(qualities[-1][0]))
            continue
        values = v[:, :end].unflatten(1, (-1, v_.block)).repeat_interleave(group, 0)
        pv = torch.einsum("hrjk,hjkd->hjrd", p, values)
        exact = pv.sum(1) / z.sum(-1)[..., None]
        if pooled is not None:
            n = end // pooled.size
            c = pooled.logits(x, scale)[:, :, :n]
            ec = (c - top).clamp(max=60).exp_().unflatten(-1, (z.shape[-1], -1))
            stand_in = pooled.value[:, :n].unflatten(1, (z.shape[-1], -1))
            stand_in = stand_in.repeat_interleave(group, 0)
            pc, zc = torch.einsum("hrjs,hjsd->hjrd", ec, stand_in), ec.sum(-1)
        else:
            pc, zc = torch.zeros_like(pv), torch.zeros_like(z)
        by_head = kept.transpose(0, 1)  # [Hq, G + 1, j]
        dropped = 1 - by_head
        # a block on the diagonal is always kept, so its stand-in, which sees too much, has weight 0
        total = (by_head @ pv.flatten(2) + dropped @ pc.flatten(2)).unflatten(-1, (v_.sample, -1))
        norm = by_head @ z.mT + dropped @ zc.mT  # [Hq, G + 1, 128]
        off = total / norm[..., None] - exact[:, None]
        norm_of_exact = exact.square().sum((1, 2))
        if v_.norm == "layer":
            norm_of_exact = norm_of_exact.mean().expand_as(norm_of_exact)
        weights.append(norm_of_exact)
        qualities.append((1 - off.square().sum((2, 3)) / weights[-1][:, None]).T)
    return torch.stack(qualities, -1), torch.stack(weights, -1)


def choose(quality: Tensor, weight: Tensor, rows: list[int], Nq: int, v_: Variant) -> Tensor:
    """[Hq, Nq] int64: the sparsest candidate that is good enough, per head and query block."""
    target, least = v_.target, v_.least
    if v_.measure == "error":  # the qualities are of squares
        target = 1 - (1 - v_.target) ** 2
    if v_.scope == "segment":
        enough = quality >= target  # [G + 1, Hq, m]
    else:
        over = (-2, -1) if v_.scope == "layer" else (-1,)
        w = weight / weight.sum(over, keepdim=True)
        worst = quality.amin(over, keepdim=True)
        mean = (quality * w).sum(over, keepdim=True)
        enough = (worst if v_.reduce == "min" else mean) >= target + 1e-4 * (target < 1)
        enough = (enough & (worst >= least)).expand(quality.shape)
    enough = enough.clone()
    enough[-1] = True
    first = enough.int().argmax(0)  # [Hq, m]
    segment = torch.bucketize(torch.arange(Nq), torch.tensor(rows)).to(first.device)
    return first[:, segment]


def select(q: Tensor, k: Tensor, v: Tensor, scale: float, v_: Variant) -> Selection:
    """The blocks that variant v_ keeps."""
    pooled = pooled_of(k, v, v_)
    keep = candidates(q, k, v, scale, v_)
    Nq = keep.shape[2]
    rows = audit_rows(Nq, v_.rows)
    quality, weight = quality_of(keep, q, k, v, scale, v_, rows, pooled)
    if v_.share:
        group = q.shape[0] // k.shape[0]
        quality = quality.unflatten(1, (-1, group)).mean(2).repeat_interleave(group, 1)
    chosen = choose(quality, weight, rows, Nq, v_)  # [Hq, Nq]
    index = chosen[None, :, :, None].expand(1, *keep.shape[1:])
    at_rows = chosen[:, rows][None]
    reached = quality.gather(0, at_rows)[0].mean(-1)
    return Selection(keep.gather(0, index)[0], reached, pooled)
