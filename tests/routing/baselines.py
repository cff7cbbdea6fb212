"""The baseline policies in float64 with loops: scene -> (keep, route); no code of the package."""

import math

import numpy as np

from tests.routing.scene import softmax


def largest(s, mass, exist, count):
    """The count ids of exist with the most mass."""
    ranked = sorted(exist, key=lambda j: (-mass[j], j))
    if 0 < count < len(ranked):
        s.margin = min(s.margin, mass[ranked[count - 1]] - mass[ranked[count]])
    return set(ranked[:count])


def share(s, entries, part):
    """The ids of entries {id: mass}, largest first, until they hold part of the sum."""
    kept, held, total = set(), 0.0, sum(entries.values())
    for name in sorted(entries, key=lambda n: (-entries[n], n)):
        if not s.above(part * total, held):
            break
        kept.add(name)
        held += entries[name]
        rest = [x for n, x in entries.items() if n not in kept]
        if rest:
            s.margin = min(s.margin, max(entries[name] - max(rest), 0) or s.margin)
    return kept


def oracle(s):
    keep = np.zeros_like(s.visible)
    for I in range(s.Nq):
        rows = [i for i in s.queries if i // s.bq == I]
        if rows:
            mass = s.mass[rows].mean(0)
            keep[I, sorted(share(s, dict(enumerate(mass)), s.params.coverage))] = True
        if s.visible[I].any():
            keep[I, s.first_and_last(I)[1]] = True
    return keep & s.visible, 1


def minference(s):
    everything = s.proxy
    s.proxy = s.proxy[-64:]
    p_v, p_s = s.line_masses()
    s.proxy = everything
    (_, v_exist), (_, s_exist) = s.anchors()
    keep = s.always()
    keep[:, sorted(largest(s, p_v, v_exist, math.ceil(s.params.vertical_tokens / s.bk)))] = True
    for t in largest(s, p_s, s_exist, math.ceil(s.params.slash_tokens / s.bk)):
        keep |= s.slash(t)
    return keep & s.visible, 0


def flexprefill(s):
    p = s.params
    p_v, p_s = s.line_masses()
    pooled, mean_k = s.pooled()
    by_key, by_distance = np.zeros(s.Lkv), np.zeros(s.Lkv)
    for i in s.proxy:
        by_key += s.P[i] / len(s.proxy)
        for j in range(i + s.off + 1):
            by_distance[i + s.off - j] += s.P[i, j] / len(s.proxy)
    trusted = False
    if s.proxy:
        estimate = softmax(mean_k @ s.q[s.proxy].mean(0) * p.scale, s.visible.any(0))
        divergence = sum(
            0.5 * x * math.log(2 * x / (a + b))
            for a, b in zip(estimate, p_v, strict=True)
            for x in (a, b)
            if x
        )
        trusted = not s.above(math.sqrt(max(divergence, 0)), 0.1)
    least = max(p.min_budget // s.bk, 1)

    def count(mass):
        total = np.cumsum(sorted(mass, reverse=True))
        s.margin = min(s.margin, abs(total - p.gamma).min())
        return max((int((total <= p.gamma).sum()) + 1) // s.bk + 1, least)

    (_, v_exist), (_, s_exist) = s.anchors()
    verticals = largest(s, p_v, v_exist, least if trusted else count(by_key))
    slashes = largest(s, p_s, s_exist, least if trusted else count(by_distance))
    keep = np.zeros_like(s.visible)
    keep[:, sorted(verticals)] = True
    for I in range(s.Nq):
        home = (I * s.bq + s.bq - 1 + s.off) // s.bk
        for J in range(s.Nkv):
            keep[I, J] |= home - J in slashes or J in s.first_and_last(I)
    if trusted:
        cells = {(I, J): pooled[I, J] for I in range(s.Nq) for J in range(s.Nkv)}
        for cell in share(s, cells, p.gamma):
            keep[cell] = True
    return keep & s.visible, int(trusted) if s.proxy else None


def xattention(s):
    p, S = s.params, s.params.stride
    keep = s.always()
    asked = set(s.queries)
    for I in range(s.Nq):
        row = np.zeros(s.Nkv)
        for group in range(I * s.bq, min((I + 1) * s.bq, s.Lq), S):
            if not asked & set(range(group, group + S)):
                continue
            last = min(group + S, s.Lq) - 1 + s.off
            starts = range(0, s.Nkv * s.bk, S)
            logits, seen = np.zeros(len(starts)), np.zeros(len(starts), dtype=bool)
            for g, start in enumerate(starts):
                for a in range(S):
                    i, j = group + S - 1 - a, start + a
                    if j < s.Lkv and s.valid[j]:
                        seen[g] |= j <= last
                        logits[g] += s.q[i] @ s.k[j] * p.scale / S if i in asked else 0
            if seen.any():
                weights = softmax(logits, seen)
                row += weights.reshape(s.Nkv, -1).sum(1)
        keep[I, sorted(share(s, dict(enumerate(row)), p.threshold))] = True
    return keep & s.visible, 1


BASELINES = {
    "oracle": oracle,
    "minference": minference,
    "flexprefill": flexprefill,
    "xattention": xattention,
}
