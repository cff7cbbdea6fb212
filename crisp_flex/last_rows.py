"""The last query blocks as a dense call of their own, written into the sparse result.

`dense_last_blocks` rows see every key. In the sparse kernel such a row is one program that walks
all key blocks alone, after the others are done: on an H200 2.9 ms of 128k tokens' 33 in TRITON
(D 128, one row of 1024 blocks at 3 TFLOP/s), and that once per head group. Flash SDPA splits the
keys of so few queries over the whole card.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from crisp_flex.config import CrispConfig

_MOST_HEAD_DIM = 256


def are_apart(query: Tensor, key: Tensor, value: Tensor, config: CrispConfig) -> bool:
    """Whether a causal call without padding computes its dense last blocks by `write_last_rows`.

    Args:
        query: [B, Hq, Lq, D], real or of a graph.
        key: [B, Hkv, Lkv, D].
        value: [B, Hkv, Lkv, Dv].
        config: Of the site.
    """
    D = int(query.shape[3])
    return (
        config.policy != "dense"
        and config.dense_last_blocks > 0
        and query.device.type == "cuda"
        and query.dtype in (torch.float16, torch.bfloat16)
        and int(value.shape[3]) == D
        and D % 8 == 0
        and D <= _MOST_HEAD_DIM
        # what the flash kernel asks for
        and all(statically_known_true(x.stride(3) == 1) for x in (query, key, value))
        and not statically_known_true(query.shape[0] == 0)
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


torch.library.define(
    "crisp_flex::write_last_rows",
    "(Tensor(a!) out, Tensor query, Tensor key, Tensor value, float scale, int block_q, "
    "int blocks) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@torch.library.impl("crisp_flex::write_last_rows", "cuda")
def _write_last_rows(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float, block_q: int, blocks: int
) -> None:
    """Dense attention of the last query blocks into out.

    Args:
        out: [B, Hq, Lq, D], gets the rows of the last query blocks.
        query: [B, Hq, Lq, D]; query i sees the keys 0 .. i + Lkv - Lq.
        key: [B, Hkv, Lkv, D].
        value: [B, Hkv, Lkv, D].
        scale: Factor on the logits.
        block_q: Tokens of a query block.
        blocks: Query blocks from the end, the last one of which may be short.
    """
    first = first_token(query.shape[2], block_q, blocks)
    # causal from the last key on: what F.scaled_dot_product_attention calls for a lower-right bias
    rows: Tensor = torch.ops.aten._scaled_dot_product_flash_attention.default(
        query[:, :, first:], key, value, 0.0, True, False, scale=scale
    )[0]
    out[:, :, first:].copy_(rows)


@torch.library.impl("crisp_flex::write_last_rows", "cpu")
def _write_last_rows_cpu(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float, block_q: int, blocks: int
) -> None:
    Lq, Lkv = query.shape[2], key.shape[2]
    first = first_token(Lq, block_q, blocks)
    tokens = torch.arange(Lkv)
    visible = tokens <= (torch.arange(first, Lq) + (Lkv - Lq))[:, None]
    out[:, :, first:].copy_(
        torch.nn.functional.scaled_dot_product_attention(
            query[:, :, first:], key, value, attn_mask=visible, scale=scale, enable_gqa=True
        )
    )


@torch.library.register_fake("crisp_flex::write_last_rows")
def _write_last_rows_fake(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float, block_q: int, blocks: int
) -> None:
    return None


def first_token(Lq: int, block_q: int, blocks: int) -> int:
    """First query of the last blocks of Lq tokens."""
    return max(-(-Lq // block_q) - blocks, 0) * block_q
