"""The operator crisp_flex::segments: lists for packed documents and for chunks of positions.

Query and key see each other only if their ids are equal: the number of a document, or of a chunk.
All blocks that may hold such a pair are kept. As in `crisp_flex::window`, nothing is chosen by
scores, the lists have one head, and both are equally wide.
"""

from __future__ import annotations

import torch
from torch import Tensor

from crisp_flex.routing.geometry import block_validity
from crisp_flex.routing.window import (
    WindowResult,
    causal_band,
    fake_lists,
    list_blocks,
    slots,
)

torch.library.define(
    "crisp_flex::segments",
    "(Tensor query, Tensor key, Tensor? key_valid, Tensor q_ids, Tensor k_ids, int? window, "
    "int block_q, int block_kv, *, Tensor? q_offset=None) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@torch.library.impl("crisp_flex::segments", ("cpu", "cuda"))
def segment_lists(
    query: Tensor,
    key: Tensor,
    key_valid: Tensor | None,
    q_ids: Tensor,
    k_ids: Tensor,
    window: int | None,
    block_q: int,
    block_kv: int,
    *,
    q_offset: Tensor | None = None,
) -> WindowResult:
    """The causally visible blocks in which a query and a key may have the same id.

    Exact for any ids: a pair of blocks whose ranges of ids meet is listed and left to the mask; it
    is full only where one id fills both. Ids that grow along the sequence give no block too many
    but where two segments meet inside one.

    Args:
        query: [B, Hq, Lq, D]; only its shape is read.
        key: [B, Hkv, Lkv, D], likewise.
        key_valid: [B, Lkv] bool, False where a key is padding; None if every key is valid.
        q_ids: [B, Lq] int64.
        k_ids: [B, Lkv] int64.
        window: As for `crisp_flex::window`; None where a query may see all keys before it.
        block_q: Query tokens per block.
        block_kv: Key tokens per block.
        q_offset: [1] integer position of query 0; None is Lkv - Lq.

    Returns:
        As `crisp_flex::window`, with B' = B. The work and its memory grow with B Nq Nkv.
    """
    Lq, Lkv = query.shape[2], key.shape[2]
    Nkv = -(-Lkv // block_kv)
    C = slots(query, Nkv, window, block_q, block_kv)
    offset = Lkv - Lq if q_offset is None else q_offset.long()
    blocks, near, inside = causal_band(query.device, Lq, Lkv, offset, window, block_q, block_kv, C)
    at = blocks.clamp(max=Nkv - 1)
    q_low, q_high = (ids[..., None] for ids in _id_range(q_ids, block_q))  # [B, Nq, 1]
    k_low, k_high = (ids[:, at] for ids in _id_range(k_ids, block_kv))  # [B, Nq, n]
    visible = near & (q_low <= k_high) & (k_low <= q_high)
    full = visible & inside & (k_low == k_high) & (q_low == q_high)
    if key_valid is not None:
        first_valid, all_valid = block_validity(key_valid, block_kv)
        visible = visible & (first_valid[:, at] < Lkv)
        full = full & all_valid[:, at]
    return list_blocks(visible, full, blocks, C)


def _id_range(ids: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """[B, N] each: the least and the greatest id of each block of ids [B, L]."""
    L = ids.shape[1]
    # a short last block repeats its last id
    tokens = torch.arange(-(-L // block) * block, device=ids.device).clamp(max=L - 1)
    blocked = ids[:, tokens].view(ids.shape[0], -1, block)
    return blocked.amin(-1), blocked.amax(-1)


@torch.library.register_fake("crisp_flex::segments")
def _segments_fake(
    query: Tensor,
    key: Tensor,
    key_valid: Tensor | None,
    q_ids: Tensor,
    k_ids: Tensor,
    window: int | None,
    block_q: int,
    block_kv: int,
    *,
    q_offset: Tensor | None = None,
) -> WindowResult:
    return fake_lists(query, key, q_ids.shape[0], window, block_q, block_kv)
