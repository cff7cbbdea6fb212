"""Brute-force meaning of every policy in float64 with loops; shares no code with the package.

Where the margin of a head is below about 1e-5, float32 may decide otherwise, and a test has to
leave that head out.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from tests.routing.baselines import BASELINES
from tests.routing.scene import WINDOW, Scene, softmax

# fp32 sums of 128 softmax rows stay within 1e-6 of float64 here; five times that
SCORE_BUDGET = 5e-6
DECISION_BUDGET = 1e-5
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


def hybrid(s):
    p = s.params
    p_v, p_s = s.line_masses()
    pooled, _ = s.pooled()
    always = s.always()
    if not s.queries:
        return s.visible & always, 1.0, 8.0, 2
    audits = s.audit_blocks()
    reduce = {"mean": np.mean, "min": np.min}[p.coverage_reduce]

    def by_audit_row(keep):
        return [s.coverage(keep, [i for i in s.queries if i // s.bq == I]) for I in audits]

    def covered(keep):
        return float(reduce(by_audit_row(keep)))

    for a in MULTIPLES:
        lines = s.by_lines(p_v, p_s, 2 * a, 0)
        audited = s.by_rows(pooled, a, audits) | lines | always
        value = covered(audited)
        floor = p.coverage_min == 0 or s.above(min(by_audit_row(audited)), p.coverage_min + 1e-4)
        if s.above(value, p.coverage + 1e-4) and floor:
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
        kl = sum(
            0.5 * x * math.log(x / m) for y in (est, p_v) for x, m in zip(y, mean, strict=True) if x
        )
        lines = s.above(math.sqrt(max(kl, 0)), 0.1)
    else:
        lines = p.router == "vs"
    if lines:
        keep = s.by_lines(p_v, p_s, p.alpha, p.k_min)
    else:
        keep, mass = np.zeros_like(s.visible), 0.0
        entries = ((pooled[I, J], -I, -J) for I in s.live for J in range(s.Nkv))
        for x, I, J in sorted(entries, reverse=True):
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
    if params.policy in BASELINES:
        keep, coverage, multiple, route = guarded(s, *BASELINES[params.policy](s))
    else:
        keep, coverage, multiple, route = policy[params.policy](s)
    c_struct = structure_mass(s) if params.policy != "dense" else -1.0
    if params.policy != "dense":
        keep = s.finish(keep)
    return Head(keep, s.visible, c_struct, coverage, multiple, route, s.margin)


def check(selection, query, key, key_valid, params):
    """Assert that a Selection is the oracle's; at least half of the heads must be decidable."""
    heads = solve(query, key, key_valid, params)
    stats = selection.stats.tolist()
    compared = total = 0
    for b, row in enumerate(heads):
        for h, head in enumerate(row):
            kept, visible, c_struct, coverage, multiple, route = stats[b][h]
            assert abs(c_struct - head.c_struct) < SCORE_BUDGET
            assert visible == head.visible.sum()
            total += 1
            if head.margin < DECISION_BUDGET:
                continue
            compared += 1
            differing = np.argwhere(selection.keep[b, h].numpy() != head.keep)
            assert differing.tolist() == [], f"batch {b} head {h}: blocks differ"
            assert kept == head.keep.sum()
            assert abs(coverage - head.coverage) < SCORE_BUDGET
            assert multiple == np.float32(head.multiple)
            assert route == head.route or head.route is None
    assert compared >= total / 2, f"{compared} of {total} heads are clear of their thresholds"
