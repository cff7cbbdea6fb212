"""Head groups: the heads of a long call are computed a few at a time; how many, and which.

The index table of FlexAttention, [B, Hq, Nq, P + Nkv] int32, grows with the square of the length:
with 32 query and 8 key heads of D 128 in bf16 and blocks of 128 it is 25 % of K and V at 128k
tokens and 100 % at 512k. It cannot be made narrower for good, since any head may keep all blocks
and the last row always does. With one group of heads after the other only one group's table is
alive; the result is the same, nothing can overflow and nothing is read back.

Two operators keep a group's tensors from outliving it, whatever order Inductor's scheduler prefers:
`crisp_flex::write_heads` writes a group's result into the one output, and `crisp_flex::route_after`
is `crisp_flex::route` with that output as an argument that is not read, so that a group starts when
the one before it is written. (With `aten.slice_scatter` or `cat` all pieces live until a last
copy.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from crisp_flex import torch_internals
from crisp_flex.routing.geometry import partial_slots
from crisp_flex.routing.ops import RouteResult

# At most this share of the bytes of K and V; issue 3, "Capacity".
MAX_TABLE_SHARE = 0.10
# Up to here the table is small in absolute terms (32 heads: 33 MB at 64k) and one call is fastest.
ONE_GROUP_TOKENS = 65536
# On the CPU each group would compile a kernel of its own, and its memory is not what runs out.
GROUPED_DEVICES = ("cuda",)
_INDEX_BYTES = 4


@dataclass(frozen=True, slots=True)
class HeadGroup:
    """Query heads [q_start, q_end) and the key heads [kv_start, kv_end) that they look at."""

    q_start: int
    q_end: int
    kv_start: int
    kv_end: int


def table_bytes(
    heads: int, *, Lq: int, Lkv: int, block_size: tuple[int, int], has_key_valid: bool
) -> int:
    """Bytes of the index table of that many query heads, per sequence."""
    block_q, block_kv = block_size
    Nq, Nkv = -(-Lq // block_q), -(-Lkv // block_kv)
    P = partial_slots(block_q, block_kv, Lq, Lkv, has_key_valid)
    return heads * Nq * (P + Nkv) * _INDEX_BYTES


def count_groups(
    *,
    Hq: int,
    Hkv: int,
    D: int,
    Dv: int,
    element_bytes: int,
    Lq: int,
    Lkv: int,
    block_size: tuple[int, int],
    has_key_valid: bool,
) -> int:
    """The fewest head groups with which a group's table is at most a tenth of the layer's K and V.

    A group is some KV heads with all their query heads, or, beyond Hkv groups, some of the query
    heads of one KV head: the count divides Hkv, or is Hkv times a divisor of Hq / Hkv. Where one
    query head a group is still too much it is Hq; up to ONE_GROUP_TOKENS keys it is 1.

    Example:
        32 / 8 heads, D 128, bf16, blocks of 128: 4 groups at 128k tokens, 8 at 256k, 16 at 512k.
    """
    if Lkv <= ONE_GROUP_TOKENS:
        return 1
    limit = MAX_TABLE_SHARE * Hkv * Lkv * (D + Dv) * element_bytes
    counts = [*_divisors(Hkv), *(Hkv * part for part in _divisors(Hq // Hkv)[1:])]
    for count in counts:
        table = table_bytes(
            Hq // count, Lq=Lq, Lkv=Lkv, block_size=block_size, has_key_valid=has_key_valid
        )
        if table <= limit:
            return count
    return counts[-1]


def count_groups_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    block_size: tuple[int, int],
    has_key_valid: bool,
    Lkv: int | torch.SymInt | None = None,
) -> int:
    """`count_groups` of one call, 1 on the CPU.

    Args:
        query: [B, Hq, Lq, D], real or of a graph.
        key: [B, Hkv, Lkv, D], not repeated.
        value: [B, Hkv, Lkv, Dv].
        block_size: (query, key) tokens.
        has_key_valid: The call has a padding mask.
        Lkv: Keys that are seen, where key has more; None is all of them.

    Where the length is symbolic, guards give long prompts graphs of their own: one from
    ONE_GROUP_TOKENS to the next power of two above the length at hand, which gives the count.
    """
    if query.device.type not in GROUPED_DEVICES:
        return 1
    Lq, Lkv = query.shape[2], key.shape[2] if Lkv is None else Lkv
    if not bool(Lkv > ONE_GROUP_TOKENS):
        return 1
    longest = torch_internals.size_hint(Lkv) or ONE_GROUP_TOKENS + 1
    if not isinstance(Lkv, int):
        # up to the next power of two, so that a graph serves many lengths and never too long ones
        longest = 1 << (longest - 1).bit_length()
        bool(Lkv <= longest)
    return count_groups(
        Hq=int(query.shape[1]),
        Hkv=int(key.shape[1]),
        D=int(query.shape[3]),
        Dv=int(value.shape[3]),
        element_bytes=query.element_size(),
        Lq=Lq if isinstance(Lq, int) else longest,
        Lkv=longest,
        block_size=block_size,
        has_key_valid=has_key_valid,
    )


def split_heads(count: int, *, Hq: int, Hkv: int) -> list[HeadGroup]:
    """The groups, in the order of their query heads; count as `count_groups` gives it."""
    G, each = Hq // Hkv, Hq // count
    return [
        HeadGroup(start, start + each, start // G, (start + each - 1) // G + 1)
        for start in range(0, Hq, each)
    ]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


torch.library.define(
    "crisp_flex::write_heads",
    "(Tensor(a!) out, Tensor piece, int q_start) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
torch.library.define(
    "crisp_flex::route_after",
    "(Tensor done, " + str(torch.ops.crisp_flex.route.default._schema).partition("(")[2],
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order),
)


@torch.library.impl("crisp_flex::write_heads", ("cpu", "cuda"))
def _write_heads(out: Tensor, piece: Tensor, q_start: int) -> None:
    out[:, q_start : q_start + piece.shape[1]].copy_(piece)


@torch.library.register_fake("crisp_flex::write_heads")
def _write_heads_fake(out: Tensor, piece: Tensor, q_start: int) -> None:
    return None


@torch.library.impl("crisp_flex::route_after", ("cpu", "cuda"))
@torch.library.register_fake("crisp_flex::route_after")
def _route_after(
    done: Tensor,
    *args: Tensor | float | str | None,
    q_offset: Tensor | None = None,
    value: Tensor | None = None,
    site: int = -1,
) -> RouteResult:
    result: RouteResult = torch.ops.crisp_flex.route.default(
        *args, q_offset=q_offset, value=value, site=site
    )
    return result
