"""The true attention mass that a route call keeps on some query blocks: exact, keys in chunks."""

from __future__ import annotations

import itertools
import random

import torch
from torch import Tensor

from crisp_flex.block_lists import kept_blocks
from crisp_flex.routing.ops import RouteCall

# Logits that are held at a time: 64 MB in fp32.
_MOST_LOGITS = 1 << 24


def sample_rows(count: int, Nq: int, *, seed: int) -> list[int]:
    """Query blocks to measure: one from each of `count` equal parts of 0 .. Nq - 1, ascending.

    Args:
        count: How many, at least 1; all rows where there are fewer.
        Nq: Query blocks to choose from.
        seed: The same gives the same rows.

    Example:
        >>> sample_rows(4, 3, seed=0)
        [0, 1, 2]
        >>> rows = sample_rows(2, 100, seed=7)
        >>> len(rows), 0 <= rows[0] < 50 <= rows[1] < 100
        (2, True)
    """
    if count >= Nq:
        return list(range(Nq))
    choice = random.Random(seed)
    edges = [part * Nq // count for part in range(count + 1)]
    return [choice.randrange(low, high) for low, high in itertools.pairwise(edges)]


@torch.no_grad()
def kept_mass(call: RouteCall, row: int) -> Tensor:
    """The share of the softmax mass of one query block that its kept key blocks hold.

    Computed in fp32 from the call's own q and k, on their device, with nothing read back.

    Args:
        call: A run of the route op.
        row: The query block.

    Returns:
        [B, Hq] fp32 in [0, 1], the mean over the block's queries; 1 where they see no key.
    """
    with torch.autocast(call.query.device.type, enabled=False):  # of the caller of the op
        return _kept_mass(call, row)


def _kept_mass(call: RouteCall, row: int) -> Tensor:
    params, q, k = call.params, call.query, call.key
    B, Hq, Lq, D = q.shape
    Hkv, Lkv = k.shape[1], k.shape[2]
    Nkv = -(-Lkv // params.block_kv)
    first, last = row * params.block_q, min((row + 1) * params.block_q, Lq)
    counts, buffer, full_counts, _ = call.result
    kept = kept_blocks(counts[:, :, row], buffer[:, :, row], full_counts[:, :, row], Nkv)
    tokens = torch.arange(first, last, device=q.device)
    position = tokens + ((Lkv - Lq) if call.q_offset is None else call.q_offset.reshape(()))
    grouped = (q[:, :, first:last].float() * params.scale).reshape(B, Hkv, -1, D)
    largest = torch.full((B, Hq, last - first), -torch.inf, device=q.device)
    total, held = torch.zeros_like(largest), torch.zeros_like(largest)
    # whole key blocks at a time
    blocks = max(_MOST_LOGITS // (B * Hq * (last - first) * params.block_kv), 1)
    # no key after the last query is seen, where that is known without reading back
    end = Lkv if call.q_offset is not None else last + Lkv - Lq
    for start in range(0, end, step := blocks * params.block_kv):
        stop = min(start + step, end)
        logits = grouped @ k[:, :, start:stop].float().transpose(-1, -2)
        logits = logits.reshape(B, Hq, last - first, stop - start)
        keys = torch.arange(start, stop, device=q.device)
        hidden = (keys > position[:, None]).expand(B, 1, -1, -1)
        if call.key_valid is not None:
            hidden = hidden | ~call.key_valid[:, None, None, start:stop]
        logits = logits.masked_fill(hidden, -torch.inf)
        top = torch.maximum(largest, logits.amax(-1))
        base = top.clamp(min=-1e30)  # a row that has seen nothing yet
        weights = (logits - base[..., None]).exp()
        shrink = (largest - base).exp()
        total = total * shrink + weights.sum(-1)
        of_key = kept[..., keys // params.block_kv]
        held = held * shrink + (weights * of_key[:, :, None]).sum(-1)
        largest = top
    seen = total > 0
    share = (held / total.where(seen, 1.0)).where(seen, 0.0).sum(-1)
    rows = seen.sum(-1)
    return (share / rows.clamp(min=1)).where(rows > 0, 1.0).clamp(max=1.0)
