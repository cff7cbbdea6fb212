"""What an adapter is worth: retrieval over length and depth, and next-token loss at 8k.

An answer counts if greedy decoding would give all of its tokens, which is so exactly if each of
them is the argmax after the ones before it. Questions that share a prefix do not see each other.
"""

import math
import time

import numpy as np
import torch
import torch.nn.functional as F
from long_context_sequences import probe
from long_context_text import KINDS

NEEDLES = 8
Z95 = 1.959964
SEED = 20261201
# Positions whose logits over the vocabulary are in memory at a time.
LOGIT_ROWS = 1024


def interval(hits, n):
    """Wilson's 95 % interval of a share."""
    share, z2 = hits / n, Z95 * Z95
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return max(middle - half, 0.0), min(middle + half, 1.0)


@torch.no_grad()
def answered(network, projections, found, device):
    """[bool]: whether each question of a Probe is answered, in order."""
    caches = []
    prefix = torch.from_numpy(found.prefix)[None].to(device)
    network.hidden(prefix, projections, on_keys=lambda k, v: caches.append((k, v)))
    longest = max(len(ids) for ids, _, _ in found.questions)
    ids = np.zeros((len(found.questions), longest), np.int64)
    for row, (question, _, _) in zip(ids, found.questions, strict=True):
        row[: len(question)] = question
    hidden = network.follow(torch.from_numpy(ids).to(device), projections, caches)
    best = network.logits(hidden).argmax(-1).cpu().numpy()
    return [
        bool((best[i, start - 1 : len(question) - 1] == question[start:]).all())
        for i, (question, start, _) in enumerate(found.questions)
    ]


def probes(text, L, *, task, samples):
    """Probes of a task: "multi" has NEEDLES facts in a prefix, "single" one. samples: questions."""
    rng = np.random.default_rng((SEED, L))
    for i in range(samples if task == "single" else -(-samples // NEEDLES)):
        if task == "single":
            depths = np.array([(i + 0.5) / samples])
        else:
            depths = (np.arange(NEEDLES) + rng.random(NEEDLES)) / NEEDLES
        yield probe(
            text, L, depths=depths, kind=KINDS[i % 2], seed=(SEED, L, i, len(depths)),
            held_out=i % 4 >= 2,
        )  # fmt: skip


def retrieval(network, projections, text, L, *, task, samples, device, until=math.inf):
    """One row: the share of `samples` questions answered, its interval, and by depth and text.

    until: time.perf_counter() after which no further prefix is started; None if there was no time.
    """
    hits, depths, kinds, wordings = [], [], [], []
    for i, found in enumerate(probes(text, L, task=task, samples=samples)):
        if time.perf_counter() > until:
            break
        got = answered(network, projections, found, device)
        hits += got
        depths += [depth for _, _, depth in found.questions]
        kinds += [found.kind] * len(got)
        wordings += ["new" if i % 4 >= 2 else "trained"] * len(got)
    if not hits:
        return None
    low, high = interval(sum(hits), len(hits))
    eighths = [min(int(depth * 8), 7) for depth in depths]
    return {
        "row": "retrieval", "task": task, "length": L, "n": len(hits),
        "exact": round(sum(hits) / len(hits), 4), "low": round(low, 4), "high": round(high, 4),
        "by_eighth_of_depth": _shares(hits, eighths), "by_text": _shares(hits, kinds),
        "by_wording": _shares(hits, wordings),
    }  # fmt: skip


def _shares(hits, groups):
    """{group: "hits/n"}."""
    counts = {}
    for hit, group in zip(hits, groups, strict=True):
        got, n = counts.get(group, (0, 0))
        counts[group] = got + hit, n + 1
    return {str(group): f"{got}/{n}" for group, (got, n) in sorted(counts.items())}


@torch.no_grad()
def text_loss(network, projections, base, text, L, *, kind, device):
    """One row: next-token loss of base and of the changed model, and KL(base || changed).

    base: (Network, projections) of the unchanged model.
    """
    ids = torch.from_numpy(text.held_out[kind][:L])[None].to(device)
    states = [net.hidden(ids, weights)[0] for net, weights in ((network, projections), base)]
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for rows in torch.arange(L - 1, device=device).split(LOGIT_ROWS):
        new, old = (
            net.logits(x[rows]).log_softmax(-1)
            for net, x in zip((network, base[0]), states, strict=True)
        )
        target = ids[0, rows + 1]
        kl = (old.exp() * (old - new)).sum()
        sums += torch.stack([F.nll_loss(x, target, reduction="sum") for x in (old, new)] + [kl])
    old, new, kl = (sums / (L - 1)).tolist()
    return {
        "row": "text", "text": kind, "length": L, "loss_base": round(old, 4),
        "loss": round(new, 4), "kl": round(kl, 4),
    }  # fmt: skip
