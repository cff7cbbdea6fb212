"""Stage `probe`: exact attention mass of a few query rows, as sums per block, bin and window.

The rows' probabilities are made 128 rows at a time and for as many heads as fit a budget, so
that no [Lq, Lkv] tensor exists.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from crisp_flex.routing.geometry import WINDOW_TOKENS, Geometry

# Probabilities made at once: 1 GiB in fp32, or one KV head's group if that is more.
CHUNK_ELEMENTS = 1 << 28


@dataclass(frozen=True, slots=True)
class Probe:
    """What the exact rows say: fp32 masses, means over valid rows (0 if a sequence has none).

    B' is B with a key mask, else 1.
    """

    # [B, Hq, Nkv]: mass per key block, and per distance bin of block_kv tokens, of the proxy rows.
    p_v: Tensor
    p_s: Tensor
    # [B, Hq, Lkv]: the same by key, and by distance.
    token_mass: Tensor
    distance_mass: Tensor
    # [B, Hq]: mass of the first 128 and the last 128 keys, once where they overlap.
    c_struct: Tensor
    # [B, Hq, D] fp32: mean proxy query.
    mean_query: Tensor
    # [B, Hq, S, Nkv] and [B', S] int64: p_v split by the query blocks that the proxy rows lie in.
    proxy_mass: Tensor
    proxy_blocks: Tensor
    # [B'] bool: the sequence has a valid query, so that the masses sum to 1.
    has_rows: Tensor
    # [B, Hq, m, Nkv]: mass per key block of m audited query blocks; [B', m] their ids and whether
    # they count (a repeat of the block before does not).
    audit_mass: Tensor
    audit_blocks: Tensor
    audit_distinct: Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """Query rows: positions among the keys [B', R] int64, which of them count, a bound on them."""

    positions: Tensor
    valid: Tensor
    # no row sees a key at or past this position
    key_limit: int


def probe(
    query: Tensor,
    key: Tensor,
    geometry: Geometry,
    *,
    scale: float,
    audit_rows: int,
    proxy_tokens: int = WINDOW_TOKENS,
) -> Probe:
    """Exact masses of the proxy rows and of audit_rows query blocks.

    Args:
        query: [B, Hq, Lq, D], any float dtype.
        key: [B, Hkv, Lkv, D], Hq a multiple of Hkv.
        geometry: Of this call.
        scale: Factor on the logits.
        audit_rows: Query blocks to audit; 0 for none.
        proxy_tokens: Number of proxy rows, at most 128.
    """
    g = geometry
    rows = _proxy_rows(g, proxy_tokens)
    weights = _mean_weights(rows)  # [B', R]
    last_block = (g.end - 1 - g.offset) // g.block_q
    slots = torch.arange((WINDOW_TOKENS + g.block_q - 2) // g.block_q + 1, device=query.device)
    proxy_blocks = (last_block[:, None] - slots).clamp(0, g.Nq - 1)
    row_block = (rows.positions - g.offset) // g.block_q
    in_slot = (last_block[:, None] - row_block)[:, None] == slots[:, None]  # [B', S, R]

    tokens, distances = [], []
    for probs in row_probabilities(query, key, rows, g, scale):
        tokens.append((in_slot * weights[:, None])[:, None] @ probs)  # [B, h, S, Lkv]
        distances.append(_distance_mass(probs, weights, g))
    by_token = torch.cat(tokens, 1)
    by_distance = torch.cat(distances, 1)
    proxy_mass = block_sums(by_token, g)

    audit_blocks, distinct = g.audit_blocks(max(audit_rows, 1))
    audits = [_audit(query, key, g, audit_blocks, i, audit_rows, scale) for i in range(audit_rows)]
    return Probe(
        p_v=proxy_mass.sum(2),
        p_s=block_sums(by_distance, g),
        token_mass=by_token.sum(2),
        distance_mass=by_distance,
        c_struct=(by_token.sum(2) * structure_tokens(g)[:, None]).sum(-1),
        mean_query=(weights[:, None, None] @ _take_queries(query, rows, g))[:, :, 0],
        proxy_mass=proxy_mass,
        proxy_blocks=proxy_blocks,
        has_rows=rows.valid.any(-1),
        audit_mass=torch.stack(audits, 2) if audits else proxy_mass[:, :, :0],
        audit_blocks=audit_blocks[:, :audit_rows],
        audit_distinct=distinct[:, :audit_rows],
    )


def _proxy_rows(g: Geometry, proxy_tokens: int) -> Rows:
    """The last min(proxy_tokens, Lq) positions before a sequence's end; the valid ones count."""
    count = min(proxy_tokens, g.Lq)
    positions = g.end[:, None] - count + torch.arange(count, device=g.end.device)
    return Rows(positions, positions >= g.proxy_start()[:, None], g.Lkv)


def _audit(
    query: Tensor, key: Tensor, g: Geometry, blocks: Tensor, i: int, count: int, scale: float
) -> Tensor:
    """[B, Hq, Nkv]: mean block mass of the valid rows of audit block i of count."""
    key_limit = g.Lkv
    if g.key_valid is None and isinstance(g.offset, int):
        # the same block as in Geometry.audit_blocks, known without reading the tensor
        block = ((g.Lq * (i + 1) + count - 1) // count - 1) // g.block_q
        key_limit = min((block + 1) * g.block_q + g.offset, g.Lkv)
    return query_block_mass(query, key, g, blocks[:, i], key_limit, scale)


def query_block_mass(
    query: Tensor, key: Tensor, g: Geometry, blocks: Tensor, key_limit: int, scale: float
) -> Tensor:
    """[B, Hq, Nkv]: mean block mass of the valid rows of one query block of each sequence.

    Args:
        query: [B, Hq, Lq, D].
        key: [B, Hkv, Lkv, D].
        g: Of this call.
        blocks: [B' or 1] int64 query block of each sequence.
        key_limit: No row of these blocks sees a key at or past this position.
        scale: Factor on the logits.
    """
    positions = blocks[:, None] * g.block_q + torch.arange(g.block_q, device=query.device)
    positions = positions + g.offset
    valid = (positions >= g.start[:, None]) & (positions < g.end[:, None])
    # a short last block reaches past the queries
    valid = valid & (positions < g.Lq + g.offset)
    rows = Rows(positions.expand(valid.shape), valid, key_limit)
    weights = _mean_weights(rows)[:, None, None]  # [B', 1, 1, R]
    mass = [weights @ probs for probs in row_probabilities(query, key, rows, g, scale)]
    return block_sums(torch.cat(mass, 1), g)[:, :, 0]


def _mean_weights(rows: Rows) -> Tensor:
    """[B', R] fp32: 1 / (number of valid rows) on the valid rows, else 0."""
    return rows.valid / rows.valid.sum(-1, keepdim=True).clamp(min=1)


def _take_queries(query: Tensor, rows: Rows, g: Geometry) -> Tensor:
    """[B, Hq, R, D] fp32 queries at the rows' positions, zero where a row does not count."""
    index = (rows.positions - g.offset).clamp(0, g.Lq - 1)
    B, Hq, _, D = query.shape
    taken = query.gather(2, index[:, None, :, None].expand(B, Hq, -1, D))
    return torch.where(rows.valid[:, None, :, None], taken, 0.0).float()


def row_probabilities(
    query: Tensor, key: Tensor, rows: Rows, g: Geometry, scale: float
) -> Iterator[Tensor]:
    """softmax(q_rows @ K^T * scale) over the visible keys, [B, h, R, key_limit] fp32 per chunk.

    The chunks of query heads come in order. A row that does not count has no meaning.
    """
    queries = _take_queries(query, rows, g) * scale
    hidden = torch.arange(rows.key_limit, device=key.device) > rows.positions[:, :, None]
    if g.key_valid is not None:
        hidden = hidden | ~g.key_valid[:, None, : rows.key_limit]
    yield from probabilities(queries, key[:, :, : rows.key_limit], hidden[:, None])


def probabilities(
    queries: Tensor, key: Tensor, hidden: Tensor, *, inf_is_nan: bool = False
) -> Iterator[Tensor]:
    """softmax(queries @ K^T) over the keys that are not hidden, [B, h, R, L] fp32 per chunk.

    Args:
        queries: [B, Hq, R, D] fp32, scaled.
        key: [B, Hkv, L, D].
        hidden: Bool, broadcastable to [B, 1, R, L].
        inf_is_nan: Whether an Inf of the keys counts as NaN, which it may turn into or not.
    """
    (B, Hq, R, D), (Hkv, L) = queries.shape, key.shape[1:3]
    G = Hq // Hkv
    step = max(CHUNK_ELEMENTS // (B * G * R * L), 1)
    for h in range(0, Hkv, step):
        keys = key[:, h : h + step].float()
        if inf_is_nan:
            keys = keys + (keys - keys)
        grouped = queries[:, h * G : (h + step) * G].reshape(B, -1, G * R, D)
        logits = (grouped @ keys.mT).view(B, -1, R, L)
        yield logits.masked_fill_(hidden, torch.finfo(torch.float32).min).softmax(-1)


def _distance_mass(probs: Tensor, weights: Tensor, g: Geometry) -> Tensor:
    """[B, h, Lkv]: weighted sum over the proxy rows of probs [B, h, R, Lkv], by distance.

    Rows are one position apart, so in a view whose rows start one element later each, a column
    holds equal distances.
    """
    B, h, R, Lkv = probs.shape
    width = Lkv + R
    # zeros in front, behind, and after each row, for row i to read its keys from R - 1 - i on
    flat = probs.new_zeros(B, h, R * width + 2 * R - 1)
    inner = flat[:, :, R - 1 : R - 1 + R * width].view(B, h, R, width)
    inner[..., :Lkv].copy_(probs).mul_(weights[:, None, :, None])
    sheared = flat.as_strided((B, h, R, width), (*flat.stride()[:2], width + 1, 1))
    by_column = sheared.sum(2)  # the column of distance x is end - 1 - x
    column = g.end[:, None] - 1 - torch.arange(Lkv, device=g.end.device)
    mass = by_column.gather(2, column.clamp(min=0)[:, None].expand(B, h, -1))
    return mass.masked_fill((column < 0)[:, None], 0.0)


def structure_tokens(g: Geometry) -> Tensor:
    """[B', Lkv] bool: the first 128 and the last 128 keys of each sequence."""
    tokens = torch.arange(g.Lkv, device=g.end.device)
    start, end = g.start[:, None], g.end[:, None]
    return (tokens < start + WINDOW_TOKENS) | (tokens >= end - WINDOW_TOKENS)


def block_sums(by_token: Tensor, g: Geometry) -> Tensor:
    """[..., Nkv]: sums of by_token [..., at most Lkv] over blocks of block_kv."""
    padded = pad(by_token, (0, g.Nkv * g.block_kv - by_token.shape[-1]))
    return padded.view(*padded.shape[:-1], g.Nkv, g.block_kv).sum(-1)
