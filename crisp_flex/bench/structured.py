"""Queries, keys and values of heads with a sink, columns, slashes through RoPE and topics.

Every query head gets its own mix of patterns, about a wanted share of blocks at any length, made
head by head, so that nothing of the size of q exists in float32. Densities at D 128, eager
reference on the CPU (2026-11-30): 32/8 heads 22 % at 8k and 12.3 % at 32k, 8/8 heads 12.4 % at
128k, 4/4 heads 3.1 % at 512k. A device's own random numbers change them a little.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Heads(Protocol):
    """Attention heads of one layer."""

    @property
    def Hq(self) -> int:
        """Query heads."""

    @property
    def Hkv(self) -> int:
        """Key heads, a divisor of Hq."""

    @property
    def D(self) -> int:
        """Head dim."""


ROPE_THETA = 1e7
# Of the D/2 pairs of dims, from the fastest: those up to FAST turn so quickly that they tell
# distances (slashes), those from SLOW on turn so little that they carry content at any length.
FAST, SLOW = 0.5, 0.8
# Logits where a head finds what it looks for, above a background of standard deviation 1 to 2.
SINK, COLUMN, SLASH, TOPIC = 12.0, 16.0, 20.0, 11.0
# Above this length they grow by ln(L / SHARP_TOKENS), as the background's mass does.
SHARP_TOKENS = 131072
# Tokens per topic segment; log-normal spread of the lengths of queries and of keys (the tail).
SEGMENT, QUERY_TAIL, KEY_TAIL = 512, 0.2, 0.05
# Columns and topics that come out near the wanted share, by trial (tests/benchmarks).
COLUMNS_PER_BLOCK, TOPIC_SHARE = 0.4, 0.45
# What the query heads look at besides the sink, in turn; a weight of 1 finds it at its full logit.
MIXES = (
    {"column": 1.0},
    {"slash": 1.0},
    {"topic": 1.0},
    {"column": 1.0, "slash": 0.9, "topic": 0.4},
)


def here() -> str:
    """Where the inputs are made unless told otherwise."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def default_share(L: int) -> float:
    """The share of blocks that `structured` aims at: 12 % to 128k tokens, then as if in 16 bits."""
    return min(0.12, 0.12 * 131072 / L)


def structured(
    heads: Heads,
    L: int,
    *,
    share: float | None = None,
    sharp_tokens: int = SHARP_TOKENS,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    device: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of heads with a sink, columns, slashes through RoPE, topics, and a background.

    Args:
        heads: Hq, Hkv and D.
        L: Tokens.
        share: About the share of blocks that policy "hybrid" (balanced) keeps, where that is above
            what it always keeps (a tenth at 8k); None is default_share(L).
        sharp_tokens: Tokens from which on the logits of what is found grow with ln(L).
        seed: Of all random numbers; they differ between devices.
        dtype: Of the result.
        device: None is CUDA where there is one.

    Returns:
        q [1, Hq, L, D], k and v [1, Hkv, L, D].
    """
    device = device or here()
    share = default_share(L) if share is None else share
    G, D = heads.Hq // heads.Hkv, heads.D
    q, k, v = (
        torch.empty(1, H, L, D, dtype=dtype, device=device)
        for H in (heads.Hq, heads.Hkv, heads.Hkv)
    )
    rope = Rope(L, D, device)
    for head in range(heads.Hkv):
        g = torch.Generator(device).manual_seed(1000 * seed + head)
        # from few to many columns and topics
        spread = 0.6 + 0.8 * (head + 0.5) / heads.Hkv
        sharper = max(math.log(L / sharp_tokens), 0.0)
        scene = Scene.random(L, D, share * spread, sharper, g, device)
        k[0, head] = rope(scene.keys(g))
        v[0, head].normal_(generator=g)
        for member in range(G):
            mix = MIXES[(head + member) % len(MIXES)]
            q[0, head * G + member] = rope(scene.queries(mix, g))
    return q, k, v


class Rope:
    """Rotary position embedding of [L, D], the halves of D rotating against each other."""

    def __init__(self, L: int, D: int, device: str) -> None:
        angle = torch.arange(L, device=device, dtype=torch.float64)[:, None] * frequencies(
            D, device
        )
        self.cos, self.sin = angle.cos().float(), angle.sin().float()

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., L, D], turned."""
        return turn(x, self.cos, self.sin)


def frequencies(D: int, device: str) -> Tensor:
    """[D/2] float64, radians per token of each pair of dims."""
    exponents = torch.arange(0, D, 2, device=device, dtype=torch.float64) / D
    return torch.pow(ROPE_THETA, -exponents)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., D] with its pairs of dims (p, p + D/2) turned."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


@dataclass(frozen=True)
class Scene:
    """One KV head: what stands where, and the directions that say so (before RoPE)."""

    L: int
    # added to the logits
    sharper: float
    # [D] each, as long as makes its logit with itself 1
    sink: Tensor
    column: Tensor
    slash: Tensor
    # the slash vector as the keys carry it: turned by the slash's distance
    slash_key: Tensor
    # [number of topics, D], and the topic of each segment
    topics: Tensor
    topic_of: Tensor
    column_at: Tensor

    @classmethod
    def random(
        cls, L: int, D: int, share: float, sharper: float, g: torch.Generator, device: str
    ) -> Scene:
        """A KV head whose patterns take about `share` of the blocks."""
        half = D // 2
        unit = D**0.25

        def uniform() -> float:
            return float(torch.rand(1, generator=g, device=device))

        # the slowest first: the sink's and the columns' dims
        slow = torch.arange(half - 1, int(SLOW * half) - 1, -1, device=device)
        content = torch.cat([slow, slow + half])
        basis = torch.zeros(2, D, device=device)
        basis[[0, 1], content[:2]] = unit
        topic_count = max(round(1 / (TOPIC_SHARE * share)), 2)
        topics = torch.zeros(topic_count, D, device=device)
        random = torch.randn(topic_count, len(content) - 2, generator=g, device=device)
        topics[:, content[2:]] = unit * F.normalize(random, dim=-1)
        slash = torch.zeros(D, device=device)
        fast = torch.arange(int(FAST * half), device=device)
        phase = torch.randn(2, len(fast), generator=g, device=device)
        slash[fast], slash[fast + half] = F.normalize(phase, dim=0) * unit / len(fast) ** 0.5
        angle = frequencies(D, device) * round(L * 0.5 * uniform() ** 2)
        count = max(round(COLUMNS_PER_BLOCK * share * L / 128), 4)
        # all along the prompt and denser at its start: any stretch of queries has one to look at
        part = torch.arange(count, device=device) + torch.rand(count, generator=g, device=device)
        part = part / count
        return cls(
            L=L, sharper=sharper, sink=basis[0], column=basis[1], slash=slash,
            slash_key=turn(slash, angle.cos().float(), angle.sin().float()), topics=topics,
            topic_of=torch.randint(topic_count, (-(-L // SEGMENT),), generator=g, device=device),
            column_at=(L * part**1.5).long().clamp(1, max(L - 1, 1)) % L,
        )  # fmt: skip

    def asked(self) -> Tensor:
        """[L, D]: the topic of each token's segment."""
        return self.topics[self.topic_of].repeat_interleave(SEGMENT, 0)[: self.L]

    def keys(self, g: torch.Generator) -> Tensor:
        """[L, D] fp32: a background, all of the head's patterns, and the sink at token 0."""
        k = self._background(g)
        k += self._length_of(SLASH) * self.slash_key
        k += self._length_of(TOPIC) * self.asked()
        k *= self._lengths(KEY_TAIL, g)
        # columns hold less of all else, so that those of a head are of about the same strength
        k[self.column_at] = 0.5 * k[self.column_at] + self._length_of(COLUMN) * self.column
        k[0] += self._length_of(SINK) * self.sink
        return k

    def queries(self, mix: Mapping[str, float], g: torch.Generator) -> Tensor:
        """[L, D] fp32: a background, and what the head looks at by the weights of its mix."""
        q = self._background(g)
        q += self._length_of(SINK) * self.sink
        q += self._length_of(COLUMN) * mix.get("column", 0.0) * self.column
        q += self._length_of(SLASH) * mix.get("slash", 0.0) * self.slash
        if mix.get("topic"):
            q += self._length_of(TOPIC) * mix["topic"] * self.asked()
        return q * self._lengths(QUERY_TAIL, g)

    def _length_of(self, logit: float) -> float:
        """The length that a query's and a key's part need for the two to have this logit."""
        return float((logit + self.sharper) ** 0.5)

    def _background(self, g: torch.Generator) -> Tensor:
        D = self.sink.shape[0]
        return torch.randn(self.L, D, generator=g, device=self.sink.device)

    def _lengths(self, tail: float, g: torch.Generator) -> Tensor:
        return torch.exp(tail * torch.randn(self.L, 1, generator=g, device=self.sink.device))
