"""Brute-force meaning of every policy in float64 with loops; shares no code with the package.

One (batch, query head) at a time, from the elementwise mask and the explicit [Lq, Lkv] softmax.
`margin` is the least distance of any value to the threshold that it was compared with: below about
1e-5 float32 may decide otherwise, and a test has to leave that head out.
"""

import functools
import math
from dataclasses import dataclass, field

import numpy as np
import torch

WINDOW = 128
MULTIPLES = (8, 4, 2, 1, 0.5, 0.25, 0.1)


@dataclass
class Head:
    """Result for one (batch, head)."""

    keep: np.ndarray  # [Nq, Nkv] bool
    visible: np.ndarray  # [Nq, Nkv] bool
    c_struct: float
    coverage: float
    multiple: float
    route: int | None  # None: nothing defines it
    margin: float


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
        touched = [[self.touches(I, J, first, last) for J in range(self.Nkv)] for I in range(self.Nq)]
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
        rest = max(1 - sum(p[j] for j in anchor), 0)
        others = sorted(exist - anchor)
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
            rest = max(1 - pooled[I, first] - pooled[I, last], 0)
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


def hybrid(s):
    p = s.params
    p_v, p_s = s.line_masses()
    pooled, _ = s.pooled()
    always = s.always()
    if not s.queries:
        return s.visible & always, 1.0, 8.0, 2
    audits = s.audit_blocks()
    reduce = {"mean": np.mean, "min": np.min}[p.coverage_reduce]

    def covered(keep):
        return float(
            reduce([s.coverage(keep, [i for i in s.queries if i // s.bq == I]) for I in audits])
        )

    for a in MULTIPLES:
        lines = s.by_lines(p_v, p_s, 2 * a, 0)
        value = covered(s.by_rows(pooled, a, audits) | lines | always)
        if s.above(value, p.coverage + 1e-4):
            return s.by_rows(pooled, a, s.live) | lines | always, value, a, 2
    return s.visible.copy(), covered(s.visible), 0.0, 3


def crisp(s):
    p = s.params
    p_v, p_s = s.line_masses()
    pooled, mean_k = s.pooled()
    if p.router == "c_struct":
        lines = s.above(structure_mass(s), p.tau)
    elif p.router == "jsd":
        filled = s.visible.any(0)
        est = softmax(mean_k @ s.q[s.proxy].mean(0) * p.scale, filled) if s.proxy else p_v
        mean = (est + p_v) / 2
        kl = sum(0.5 * x * math.log(x / m) for y in (est, p_v) for x, m in zip(y, mean) if x > 0)
        lines = s.above(math.sqrt(max(kl, 0)), 0.1)
    else:
        lines = p.router == "vs"
    if lines:
        keep = s.by_lines(p_v, p_s, p.alpha, p.k_min)
    else:
        keep, mass = np.zeros_like(s.visible), 0.0
        for x, I, J in sorted(((pooled[I, J], -I, -J) for I in s.live for J in range(s.Nkv)))[::-1]:
            if not s.above(p.gamma * pooled.sum(), mass):
                break
            keep[-I, -J] = True
            mass += x
    keep = (keep | s.always()) & s.visible
    for I in range(s.Nq):
        if s.visible[I].sum() < 5:
            keep[I] = s.visible[I]
    # without a valid query there is nothing to compare
    unrouted = p.router == "jsd" and not s.proxy
    return guarded(s, keep, None if unrouted else 0 if lines else 1)


def streaming(s):
    keep = s.always()
    for I in range(s.Nq):
        for J in range(s.Nkv):
            keep[I, J] |= s.first_and_last(I)[1] - J < s.params.streaming_blocks
    return guarded(s, keep & s.visible, 0)


def dense(s):
    return s.visible.copy(), 1.0, -1.0, 3


def guarded(s, keep, route):
    value = s.coverage(keep, s.proxy)
    if s.above(1 - value, s.params.max_uncovered):
        return s.visible.copy(), s.coverage(s.visible, s.proxy), -1.0, 3
    return keep, value, -1.0, route


def structure_mass(s):
    tokens = np.arange(s.Lkv)
    picked = (tokens < s.start + WINDOW) | (tokens >= s.end - WINDOW)
    return float(s.P[s.proxy][:, picked].sum(1).mean()) if s.proxy else 0.0


def solve(query, key, key_valid, params):
    """Head results as a nested list [B][Hq]."""
    B, Hq = query.shape[:2]
    G = Hq // key.shape[1]
    if key_valid is None:
        key_valid = torch.ones(B, key.shape[2], dtype=torch.bool)
    return [
        [_solve(query[b, h], key[b, h // G], key_valid[b], params) for h in range(Hq)]
        for b in range(B)
    ]


def _solve(q, k, valid, params):
    s = Scene(q.double().numpy(), k.double().numpy(), valid.numpy(), params)
    policy = {"hybrid": hybrid, "crisp": crisp, "streaming": streaming, "dense": dense}
    keep, coverage, multiple, route = policy[params.policy](s)
    c_struct = structure_mass(s) if params.policy != "dense" else -1.0
    if params.policy != "dense":
        keep = s.finish(keep)
    return Head(keep, s.visible, c_struct, coverage, multiple, route, s.margin)
