"""Brute-force meaning of policy "bounded" in float64; shares no code with the package."""

import math
from dataclasses import dataclass

import numpy as np
import torch

from tests.routing.oracle import SCORE_BUDGET, WINDOW
from tests.routing.scene import Scene

LEFT_OUT = (
    0.6, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1, 0.07, 0.05, 0.03, 0.02, 0.01, 0.005, 0.001,
)  # fmt: skip
# Rounding of fp32 may decide otherwise within these: of a mass, and of an error over its bound.
_MASS_BUDGET = 2e-6
_ERROR_BUDGET = 1e-4


def estimate(s):
    """[Nq, Nkv]: softmax of each live block's mean query over the keys that its last row sees."""
    out = np.zeros(s.visible.shape)
    for I in sorted(s.live):
        mean = s.q[[i for i in s.queries if i // s.bq == I]].mean(0)
        seen = s.mask[min((I + 1) * s.bq, s.Lq) - 1]
        logits = s.k[seen] @ mean * s.params.scale
        weights = np.exp(logits - logits.max())
        for j, p in zip(np.flatnonzero(seen), weights / weights.sum(), strict=True):
            out[I, j // s.bk] += p
    return out


def kept_rows(s, mass, left_out, rows):
    """[Nq, Nkv] bool: what a candidate keeps in some rows."""
    keep, always = np.zeros_like(s.visible), s.always()
    for I in rows:
        for J in np.flatnonzero(s.visible[I]):
            lost = sum(x for x in mass[I, s.visible[I]] if x <= mass[I, J])
            keep[I, J] = always[I, J] or s.above(lost, left_out)
    return keep


def sampled(s):
    """Query rows that the audit looks at: 8 a block, from its last valid one backwards."""
    rows = []
    for I in s.audit_blocks() if s.queries else ():
        of_block = [i for i in s.queries if i // s.bq == I]
        rows += [i for i in of_block if (of_block[-1] - i) % max(s.bq // 8, 1) == 0][-8:]
    return rows


def outputs(s, value, rows, keep=None):
    """([R, Dv] outputs, [R] masses) of rows over the keys in kept blocks, over all without keep."""
    out, masses = [], []
    for i in rows:
        seen = np.flatnonzero(s.mask[i])
        if keep is not None:
            seen = np.array([j for j in seen if keep[i // s.bq, j // s.bk]])
        mass = s.P[i, seen].sum()
        out.append(s.P[i, seen] @ value[seen] / mass)
        masses.append(mass)
    return np.array(out), np.array(masses)


def structure_mass(s, rows):
    """Mass of the first and the last 128 keys, mean over the rows of the last audited block."""
    tokens = np.arange(s.Lkv)
    picked = (tokens < s.start + WINDOW) | (tokens >= s.end - WINDOW)
    last = [i for i in rows if i // s.bq == rows[-1] // s.bq]
    return float(s.P[last][:, picked].sum(1).mean()) if rows else 0.0


@dataclass
class Head:
    """Result for one (batch, head); a margin below 0 leaves it undecided."""

    keep: np.ndarray
    visible: np.ndarray
    c_struct: float
    coverage: float
    multiple: float
    margin: float


def solve(query, key, value, key_valid, params):
    """Head results as a nested list [B][Hq]."""
    B, Hq = query.shape[:2]
    G = Hq // key.shape[1]
    if key_valid is None:
        key_valid = torch.ones(B, key.shape[2], dtype=torch.bool)
    q, k, v = (x.double().numpy() for x in (query, key, value))
    result = []
    for b in range(B):
        valid = key_valid[b].numpy()
        scenes = [Scene(q[b, h], k[b, h // G], valid, params) for h in range(Hq)]
        values = [v[b, h // G] for h in range(Hq)]
        exact = [outputs(s, x, sampled(s))[0] for s, x in zip(scenes, values, strict=True)]
        bound = params.max_error**2 * np.mean([(x**2).sum() for x in exact])
        result.append([_choose(*each, bound) for each in zip(scenes, values, exact, strict=True)])
    return result


def _choose(s, value, exact, bound):
    mass, rows = estimate(s), sampled(s)
    audited = {i // s.bq for i in rows}
    chosen, keep, coverage, error_margin = 0.0, s.visible.copy(), 1.0, math.inf
    for left_out in LEFT_OUT:
        error, masses = 0.0, np.ones(1)
        if rows:
            tried = kept_rows(s, mass, left_out, audited)
            out, masses = outputs(s, value, rows, tried)
            error = ((out - exact) ** 2).sum()
            if error != bound:
                error_margin = min(error_margin, abs(error / bound - 1))
        if error <= bound:
            chosen, coverage = left_out, masses.mean()
            keep = kept_rows(s, mass, left_out, s.live)
            break
    margin = min(s.margin - _MASS_BUDGET, error_margin - _ERROR_BUDGET)
    return Head(s.finish(keep), s.visible, structure_mass(s, rows), coverage, chosen, margin)


def check(selection, query, key, value, key_valid, params):
    """Assert that a Selection is the oracle's; most heads must be decidable. The chosen shares."""
    chosen, undecided = [], 0
    for b, row in enumerate(solve(query, key, value, key_valid, params)):
        for h, head in enumerate(row):
            kept, visible, c_struct, coverage, multiple, route = selection.stats[b, h].tolist()
            assert abs(c_struct - head.c_struct) < SCORE_BUDGET
            assert visible == head.visible.sum()
            if head.margin < 0:
                undecided += 1
                continue
            assert multiple == np.float32(head.multiple), f"batch {b} head {h}"
            differing = np.argwhere(selection.keep[b, h].numpy() != head.keep)
            assert differing.tolist() == [], f"batch {b} head {h}: blocks differ"
            assert kept == head.keep.sum()
            assert abs(coverage - head.coverage) < SCORE_BUDGET
            assert route == (1 if multiple else 3)
            chosen.append(head.multiple)
    assert undecided <= len(chosen) / 4, f"{undecided} heads are too close to a threshold"
    return chosen
