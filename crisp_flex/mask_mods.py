"""The mask_mod functions that rewritten sites use: causal; with an offset, a window, keys, ids."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


@functools.cache
def mask_mod(
    *, offset: int | None = 0, window: int | None = None, padded: bool = False, same: bool = False
) -> Callable[..., Any]:
    """The mask_mod of a site, one function per meaning, with a name that says it.

    Args:
        offset: Position of query 0 among the keys; None: a captured [1] integer tensor has it.
        window: Keys that a query sees, itself among them; None for no limit.
        padded: A captured [B, Lkv] bool tensor, behind the offset, says which keys are there.
        same: Captured [B, Lq] and [B, Lkv] int64 tensors, behind those: ids that must be equal.

    Returns:
        A function of (b, h, q_idx, kv_idx, *captured) for `flex_call`. It has no annotations: fx
        would copy them to placeholders, where AOTAutograd's cache cannot pickle them.
    """

    def seen(position, kv_idx):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        visible = position >= kv_idx
        return visible if window is None else visible & (kv_idx > position - window)

    def shifted(q_idx):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        return q_idx + offset if offset else q_idx

    # `b * 0`: every template takes an index that is computed, not all take a constant. int64 index
    # into the key mask: the template would otherwise write 32-bit `b * Lkv + kv`.
    def fixed(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        return seen(shifted(q_idx), kv_idx)

    def fixed_padded(b, h, q_idx, kv_idx, key_valid):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        return seen(shifted(q_idx), kv_idx) & key_valid[b, kv_idx.to(torch.int64)]

    def moved(b, h, q_idx, kv_idx, at):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        return seen(q_idx + at[b * 0], kv_idx)

    def moved_padded(b, h, q_idx, kv_idx, at, key_valid):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        return seen(q_idx + at[b * 0], kv_idx) & key_valid[b, kv_idx.to(torch.int64)]

    def alike(b, q_idx, kv_idx, q_ids, k_ids):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        return q_ids[b, q_idx.to(torch.int64)] == k_ids[b, kv_idx.to(torch.int64)]

    def fixed_same(b, h, q_idx, kv_idx, q_ids, k_ids):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        return fixed(b, h, q_idx, kv_idx) & alike(b, q_idx, kv_idx, q_ids, k_ids)

    def fixed_padded_same(b, h, q_idx, kv_idx, valid, q_ids, k_ids):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        seen = fixed_padded(b, h, q_idx, kv_idx, valid)
        return seen & alike(b, q_idx, kv_idx, q_ids, k_ids)

    def moved_same(b, h, q_idx, kv_idx, at, q_ids, k_ids):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        return moved(b, h, q_idx, kv_idx, at) & alike(b, q_idx, kv_idx, q_ids, k_ids)

    def moved_padded_same(b, h, q_idx, kv_idx, at, valid, q_ids, k_ids):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        seen = moved_padded(b, h, q_idx, kv_idx, at, valid)
        return seen & alike(b, q_idx, kv_idx, q_ids, k_ids)

    chosen: Callable[..., Any] = {  # type: ignore[assignment]
        (False, False, False): fixed,
        (False, True, False): fixed_padded,
        (True, False, False): moved,
        (True, True, False): moved_padded,
        (False, False, True): fixed_same,
        (False, True, True): fixed_padded_same,
        (True, False, True): moved_same,
        (True, True, True): moved_padded_same,
    }[offset is None, padded, same]
    parts = ["causal"]
    if offset is None:
        parts.append("offset")
    elif offset:
        parts.append(f"offset_{offset}")
    if window is not None:
        parts.append(f"window_{window}")
    if padded:
        parts.append("padded")
    if same:
        parts.append("same_ids")
    chosen.__name__ = "_".join([*parts, "mod"])
    return chosen
