"""One head seen elementwise in float64, the oracle's parts: mask, softmax, lines, pooled map.

Shares no code with the package. `margin` is the least distance of any value to the threshold that
it was compared with.
"""

import functools
import math
from dataclasses import dataclass, field

import numpy as np

WINDOW = 128


@dataclass(eq=False)
class Scene:
    """One head's inputs and what follows from them alone."""

    q: np.ndarray
    k: np.ndarray
    valid: np.ndarray
    params: object
    margin: float = math.inf
    P: np.ndarray = field(init=False)

    def __post_init__(self):
        p = self.params
        self.Lq, self.Lkv = len(self.q), len(self.k)
        self.off = self.Lkv - self.Lq
        self.bq, self.bk = p.block_q, p.block_kv
        self.Nq, self.Nkv = math.ceil(self.Lq / self.bq), math.ceil(self.Lkv / self.bk)
        self.mask = mask_of(self.Lq, self.Lkv, self.valid)
        logits = np.where(self.mask, self.q @ self.k.T * p.scale, -np.inf)
        top = np.where(self.mask.any(1), logits.max(1), 0.0)[:, None]
        weights = np.where(self.mask, np.exp(logits - top), 0.0)
        self.P = weights / np.maximum(weights.sum(1, keepdims=True), 1e-300)
        self.visible = np.array(
            [[self.tile(self.mask, I, J).any() for J in range(self.Nkv)] for I in range(self.Nq)]
        )
        # [Lq, Nkv]: mass of each row per key block
        self.mass = np.add.reduceat(self.P, np.arange(0, self.Lkv, self.bk), axis=1)
        where = np.flatnonzero(self.valid)
        self.start, self.end = (int(where[0]), int(where[-1]) + 1) if len(where) else (0, 0)
        self.queries = [i for i in range(self.Lq) if self.start <= i + self.off < self.end]
        self.live = {i // self.bq for i in self.queries}
        self.proxy = self.queries[-WINDOW:]

    def tile(self, x, I, J):
        return x[I * self.bq : (I + 1) * self.bq, J * self.bk : (J + 1) * self.bk]

    def above(self, value, threshold):
        # a value that is its own mean is equal in any precision
        if value != threshold:
            self.margin = min(self.margin, abs(value - threshold))
        return value > threshold

    def touches(self, I, J, first, last):
        """Some pair of the whole grid block has a distance in [first, last]."""
        nearest = I * self.bq + self.off - (J * self.bk + self.bk - 1)
        farthest = I * self.bq + self.bq - 1 + self.off - J * self.bk
        return nearest <= last and farthest >= first

    @functools.cache  # noqa: B019
    def slash(self, t):
        """[Nq, Nkv] bool: the grid blocks with a distance in bin t."""
        first, last = t * self.bk, t * self.bk + self.bk - 1
        touched = [
            [self.touches(I, J, first, last) for J in range(self.Nkv)] for I in range(self.Nq)
        ]
        return np.array(touched)

    def first_and_last(self, I):
        seen = np.flatnonzero(self.visible[I])
        return (int(seen[0]), int(seen[-1])) if len(seen) else (0, 0)

    def always(self):
        out = np.zeros_like(self.visible)
        for I in range(self.Nq):
            first, last = self.first_and_last(I)
            for J in range(self.Nkv):
                out[I, J] = J in (first, last) or self.touches(I, J, 0, WINDOW - 1)
        return out & self.visible

    def line_masses(self):
        p_v, p_s = np.zeros(self.Nkv), np.zeros(self.Nkv)
        for i in self.proxy:
            p_v += self.mass[i] / len(self.proxy)
            bins = (i + self.off - np.arange(self.Lkv)) // self.bk
            for t in range(self.Nkv):
                p_s[t] += self.P[i, bins == t].sum() / len(self.proxy)
        return p_v, p_s

    def anchors(self):
        """Verticals and slashes: (anchor ids, ids that exist)."""
        blocks = {int(j) // self.bk for j in np.flatnonzero(self.valid)}
        recent_keys = range(max(self.end - WINDOW, self.start), self.end)
        verticals = {self.start // self.bk, *(j // self.bk for j in recent_keys)} & blocks
        bins = {x // self.bk for x in range(self.end - self.start)}
        slashes = {(i + self.off - self.start) // self.bk for i in self.proxy}
        if self.end:
            nearest_block = max(self.end - WINDOW, self.start) // self.bk
            slashes |= {x // self.bk for x in range(self.end - nearest_block * self.bk)}
        return (verticals, blocks), (slashes & bins, bins)

    def lines(self, p, anchor, exist, multiple, k_min):
        others = sorted(exist - anchor)
        rest = sum(p[j] for j in others)
        floor = max(rest / max(len(others), 1), 1 / (1024 * max(len(exist), 1)))
        kept = {j for j in others if self.above(p[j], multiple * floor)}
        if len(kept) < min(k_min, len(others)):
            ranked = sorted(others, key=lambda j: (-p[j], j))
            if len(ranked) > k_min:
                self.margin = min(self.margin, p[ranked[k_min - 1]] - p[ranked[k_min]])
            kept = set(ranked[:k_min])
        return kept | anchor

    def by_lines(self, p_v, p_s, multiple, k_min):
        (v_anchor, v_exist), (s_anchor, s_exist) = self.anchors()
        verticals = self.lines(p_v, v_anchor, v_exist, multiple, k_min)
        slashes = self.lines(p_s, s_anchor, s_exist, multiple, k_min)
        out = np.zeros_like(self.visible)
        out[:, sorted(verticals)] = True
        for t in slashes:
            out |= self.slash(t)
        return out & self.visible

    def pooled(self):
        mean_k = np.zeros((self.Nkv, self.k.shape[1]))
        for J in range(self.Nkv):
            rows = [j for j in np.flatnonzero(self.valid) if j // self.bk == J]
            if rows:
                mean_k[J] = self.k[rows].mean(0)
        out = np.zeros(self.visible.shape)
        for I in self.live:
            mean_q = self.q[[i for i in self.queries if i // self.bq == I]].mean(0)
            out[I] = softmax(mean_k @ mean_q * self.params.scale, self.visible[I])
        return out, mean_k

    def by_rows(self, pooled, multiple, rows):
        out = np.zeros_like(self.visible)
        for I in rows:
            seen = np.flatnonzero(self.visible[I])
            n = len(seen)
            first, last = self.first_and_last(I)
            rest = sum(pooled[I, J] for J in seen if J not in (first, last))
            floor = max(rest / max(n - 2, 1), 1 / (1024 * n))
            for J in seen:
                out[I, J] = self.above(pooled[I, J], multiple * floor)
        return out

    def coverage(self, keep, rows):
        """Mean over query rows of the mass in their kept blocks."""
        if not rows:
            return 1.0
        return float(np.mean([(self.mass[i] * keep[i // self.bq]).sum() for i in rows]))

    def audit_blocks(self):
        m, V = self.params.audit_rows, len(self.queries)
        return sorted({self.queries[math.ceil(s * V / m) - 1] // self.bq for s in range(1, m + 1)})

    def finish(self, keep):
        keep = keep.copy()
        for I in range(self.Nq):
            if self.live and max(self.live) - self.params.dense_last_blocks < I <= max(self.live):
                keep[I] = self.visible[I]
            if I not in self.live:
                keep[I] = False
            if self.visible[I].any():
                keep[I, self.first_and_last(I)[1]] = True
        return keep & self.visible


def mask_of(Lq, Lkv, valid):
    """[Lq, Lkv] bool, elementwise."""
    i, j = np.arange(Lq)[:, None], np.arange(Lkv)[None]
    return (j <= i + Lkv - Lq) & valid[None]


def softmax(x, visible):
    x = np.where(visible, x, -np.inf)
    x = np.exp(x - x.max())
    return x / x.sum()
