"""Queries and keys with a sink, hot columns, slashes and block-wise topics, and key masks."""

import dataclasses
import math

import torch

from crisp_flex.config import CrispConfig
from crisp_flex.routing.params import RouteParams


def structured(
    B=1, Hq=4, Hkv=2, Lq=640, Lkv=None, D=32, *, seed=0, strength=2.0, dtype=torch.float32
):
    """query [B, Hq, Lq, D] and key [B, Hkv, Lkv, D]; every head has its own mix of patterns."""
    Lkv = Lkv or Lq
    gen = torch.Generator().manual_seed(seed)
    G = Hq // Hkv
    noise = torch.randn(B, Hq + Hkv, 2048, D, generator=gen)[:, :, -Lkv:]
    q, k = noise[:, :Hq, -Lq:].clone(), noise[:, Hq:].clone()
    topics = torch.randn(B, Hkv, 64, D, generator=gen)[:, :, -math.ceil(Lkv / 32) :]
    topics = topics.repeat_interleave(32, 2)[:, :, -Lkv:]
    k += 0.7 * strength * topics
    heads = torch.rand(B, Hq, 3, generator=gen)
    asked = topics.repeat_interleave(G, 1).roll(96, 2)[:, :, -Lq:]
    q += heads[..., 0, None, None] * strength * asked
    position = torch.arange(Lkv) - Lkv
    wave = torch.stack([torch.cos(position / 20), torch.sin(position / 20)], -1)
    k[..., :2] = 2 * wave
    shifted = torch.stack([torch.cos((position - 170) / 20), torch.sin((position - 170) / 20)], -1)
    q[..., :2] = heads[..., 1, None, None] * 5 * strength * shifted[-Lq:]
    k[:, :, 0, 2] += 6 * strength
    k[:, :, Lkv // 3 :: 251, 2] += 5 * strength
    q[..., 2] += heads[..., 2, None] * 3 * strength
    return q.to(dtype), k.to(dtype)


def long_structured(L, D=128, *, Hkv=1, G=2, device="cpu"):
    """query [1, Hkv * G, L, D] and key [1, Hkv, L, D] fp32, of lengths that structured lacks."""
    g = torch.Generator(device).manual_seed(0)
    query = torch.randn(1, Hkv * G, L, D, device=device, generator=g)
    key = torch.randn(1, Hkv, L, D, device=device, generator=g)
    topics = torch.randn(1, Hkv, -(-L // 256), D, device=device, generator=g)
    topics = topics.repeat_interleave(256, 2)[:, :, :L]
    key += 1.5 * topics
    strength = torch.linspace(0.2, 1.5, Hkv * G, device=device)[:, None, None]
    query += strength * topics.roll(3000, 2).repeat_interleave(G, 1)
    key[:, :, 0, 0] += 12
    key[:, :, L // 3 :: 2011, 1] += 10
    query[..., :2] += 4
    return query, key


# name: (Lq, Lkv, B, Hq, Hkv, D, block, key mask). Odd on purpose.
SHAPES = {
    "one token": (1, 1, 1, 2, 2, 16, (128, 128), "none"),
    "one short block": (100, 100, 1, 3, 1, 64, (128, 128), "none"),
    "one block": (128, 128, 1, 2, 2, 32, (128, 128), "none"),
    "one more than a block": (129, 129, 2, 3, 1, 24, (128, 128), "none"),
    "ragged": (300, 300, 1, 3, 3, 32, (128, 128), "none"),
    "aligned": (640, 640, 1, 4, 2, 32, (128, 128), "none"),
    "long and ragged": (1000, 1000, 1, 3, 1, 32, (128, 128), "none"),
    "small blocks": (640, 640, 1, 4, 2, 16, (64, 64), "none"),
    "ragged small blocks": (1000, 1000, 1, 3, 3, 32, (64, 64), "none"),
    "half key blocks": (1000, 1000, 1, 2, 1, 32, (128, 64), "none"),
    "half query blocks": (640, 640, 1, 2, 1, 32, (64, 128), "none"),
    "aligned chunk": (384, 896, 1, 3, 1, 32, (128, 128), "none"),
    "ragged chunk": (300, 877, 1, 3, 1, 32, (128, 128), "none"),
    "chunk one short of a block": (384, 767, 1, 2, 1, 32, (128, 128), "none"),
    "short chunk of small blocks": (70, 500, 1, 2, 1, 32, (64, 64), "none"),
    "left padding": (640, 640, 2, 2, 1, 32, (128, 128), "left"),
    "left padding into a chunk": (600, 700, 2, 2, 1, 32, (64, 64), "left"),
    "right padding": (640, 700, 2, 2, 1, 32, (128, 128), "right"),
    "holes": (700, 700, 2, 2, 1, 32, (128, 64), "holes"),
    "no valid key in one sequence": (300, 300, 2, 2, 1, 32, (64, 64), "all false in the first"),
}


def case(name, *, seed=0, dtype=torch.float32, **changes):
    """query, key, key_valid, params of a shape by name, with changes to the parameters."""
    Lq, Lkv, B, Hq, Hkv, D, block, mask = SHAPES[name]
    query, key = structured(B, Hq, Hkv, Lq, Lkv, D, seed=seed, dtype=dtype)
    return query, key, key_mask(mask, B, Lkv), params(D, block, **changes)


def params(D=32, block=(128, 128), **changes):
    """RouteParams of a head dim and block sizes."""
    default = RouteParams.from_config(CrispConfig(block_size=block), D=D)
    return dataclasses.replace(default, **changes)


def key_mask(kind, B, Lkv):
    """[B, Lkv] bool key masks by name; None for "none"."""
    if kind == "none":
        return None
    tokens = torch.arange(Lkv)[None]
    length = torch.tensor([Lkv - (37 + 150 * b) % Lkv for b in range(B)])[:, None]
    if kind == "left":
        return tokens >= Lkv - length
    if kind == "right":
        return tokens < length
    if kind == "holes":
        gen = torch.Generator().manual_seed(3)
        mask = torch.rand(B, Lkv, generator=gen) > 0.3
        mask[:, 140:300] = False
        return mask
    if kind == "all false in the first":
        mask = torch.ones(B, Lkv, dtype=torch.bool)
        mask[0] = False
        return mask
    raise ValueError(kind)
