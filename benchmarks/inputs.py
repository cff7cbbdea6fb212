"""Queries and keys to measure with: hot columns, many patterns through RoPE, or a real model's.

`columns` is the simple one (heads of 4 to 39 columns each, no RoPE). `structured` is the package's
(crisp_flex/bench/structured.py). `captured` reads a file of capture_qk.py.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from crisp_flex.bench.structured import (
    MIXES,
    SEGMENT,
    SHARP_TOKENS,
    SLOW,
    Rope,
    default_share,
    here,
    structured,
    turn,
)

__all__ = [
    "MIXES", "SEGMENT", "SHARP_TOKENS", "SLOW", "Inputs", "Rope", "captured", "columns",
    "default_share", "here", "load", "structured", "turn",
]  # fmt: skip


@dataclass(frozen=True)
class Inputs:
    """q [1, Hq, L, D], k, v [1, Hkv, L, D], and what a row says about them."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    facts: dict


def columns(heads, L, *, seed=0, dtype=torch.bfloat16, device=None):
    """q, k, v whose heads look at a sink, at 4 to 40 columns each, and a little at everything."""
    device = device or here()
    g = torch.Generator(device).manual_seed(seed)
    Hq, Hkv, D = heads.Hq, heads.Hkv, heads.D
    q = torch.randn(1, Hq, L, D, device=device, generator=g)
    k = torch.randn(1, Hkv, L, D, device=device, generator=g)
    v = torch.randn(1, Hkv, L, D, device=device, generator=g)
    u = F.normalize(torch.randn(Hkv, D, device=device, generator=g), dim=-1)
    gain = (14 * D**0.5) ** 0.5
    q += gain * u.repeat_interleave(Hq // Hkv, 0)[None, :, None]
    for head in range(Hkv):
        at = torch.randint(0, L, (4 + 5 * head,), device=device, generator=g)
        at[0] = 0
        k[:, head, at] += gain * u[head]
    return q.to(dtype), k.to(dtype), v.to(dtype)


# Query heads that fill the card; a model's own heads are repeated to come near.
FILLING_HEADS = 32


def captured(path, L, *, seed=0, device=None):
    """A real model's q, k, from a file of capture_qk.py, and random v, as Inputs.

    The KV heads are repeated with their groups of query heads, so that the mix of heads and the
    group size stay the model's own: 9/3 heads become 36/12, and 4/1 become 32/8.

    Args:
        path: The file.
        L: The first L tokens are taken (they have the q, k of the shorter prompt).
        seed: Of v, whose values change neither times nor blocks.
        device: None is CUDA where there is one.
    """
    from safetensors import safe_open

    device = device or here()
    with safe_open(path, "pt", device=device) as file:
        facts = file.metadata()
        q, k = (file.get_tensor(name)[:, :L] for name in ("query", "key"))
    (Hq, length, D), Hkv = q.shape, k.shape[0]
    if length < L:
        raise SystemExit(f"{path} has {length} tokens, {L} are asked for")
    if abs(float(facts["scale"]) - D**-0.5) > 1e-6:
        raise SystemExit(f"{path}: scale {facts['scale']} is not 1/sqrt({D})")
    times = max(round(FILLING_HEADS / Hq), 1)
    q, k = (x.repeat(times, 1, 1)[None] for x in (q, k))
    g = torch.Generator(device).manual_seed(seed)
    v = torch.empty_like(k).normal_(generator=g)
    trained = int(facts["trained_length"])
    about = {
        "inputs": "captured", "model": facts["model"], "text": facts["text"],
        "layer": int(facts["layer"]), "tiled": f"{Hq}/{Hkv} x {times}",
    }  # fmt: skip
    if trained < L:
        about["note"] = f"beyond the {trained} tokens that the model was trained for"
    return Inputs(q, k, v, about)


def load(what, heads, L, *, share=None, sharp_tokens=SHARP_TOKENS, device=None):
    """Inputs by what --inputs says: "columns", "structured", or a file (`captured`)."""
    if what == "columns":
        return Inputs(*columns(heads, L, device=device), {"inputs": what})
    if what == "structured":
        q, k, v = structured(heads, L, share=share, sharp_tokens=sharp_tokens, device=device)
        facts = {"inputs": what, "share": round(default_share(L) if share is None else share, 4)}
        if sharp_tokens != SHARP_TOKENS:
            facts["sharp_tokens"] = sharp_tokens
        return Inputs(q, k, v, facts)
    return captured(what, L, device=device)
