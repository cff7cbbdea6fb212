"""A Llama-shaped model of a few layers with random weights, whose heads look for something.

Random weights attend to everything alike, so that no selection could drop a block. Here the query
and key projections are alike on the dims that RoPE hardly turns: a token looks for its own kind,
and a prompt of `topic_prompt` has stretches of a few kinds. Attention goes through
scaled_dot_product_attention(is_causal=True), the fastest dense form there is (Transformers hands
over a mask under torch 2.11).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from inputs import SEGMENT, SLOW, Rope, turn
from torch import nn

# Squared gain of a slow dim: a token's logit with its own kind is about GAIN * slow dims / sqrt(D).
GAIN = 5.0


@dataclass(frozen=True)
class Widths:
    """Sizes of the model; the default is Llama 3.1 8B, but for its depth and vocabulary."""

    hidden: int = 4096
    intermediate: int = 14336
    Hq: int = 32
    Hkv: int = 8
    D: int = 128
    layers: int = 4
    vocab: int = 32000


def add_widths(parser):
    """Options of a script that say the sizes of its model; `widths_of` reads them."""
    default = Widths()
    parser.add_argument("--layers", type=int, default=default.layers)
    parser.add_argument("--hidden", type=int, default=default.hidden)
    parser.add_argument("--intermediate", type=int, default=default.intermediate)
    parser.add_argument("--query-heads", type=int, default=default.Hq)
    parser.add_argument("--key-heads", type=int, default=default.Hkv)


def widths_of(args):
    """The sizes that the options of add_widths say."""
    return Widths(
        layers=args.layers, hidden=args.hidden, intermediate=args.intermediate,
        Hq=args.query_heads, Hkv=args.key_heads,
    )  # fmt: skip


class Attention(nn.Module):
    """Grouped-query attention with RoPE and a cache that is passed in and out."""

    def __init__(self, w):
        super().__init__()
        self.widths = w
        self.q = nn.Linear(w.hidden, w.Hq * w.D, bias=False)
        self.k = nn.Linear(w.hidden, w.Hkv * w.D, bias=False)
        self.v = nn.Linear(w.hidden, w.Hkv * w.D, bias=False)
        self.o = nn.Linear(w.Hq * w.D, w.hidden, bias=False)

    def forward(self, x, cos, sin, cache):
        B, L, _ = x.shape
        D = self.widths.D
        q, k, v = (p(x).view(B, L, -1, D).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = turn(q, cos, sin).to(x.dtype), turn(k, cos, sin).to(x.dtype)
        if cache is not None:
            k, v = (torch.cat(pair, 2) for pair in zip(cache, (k, v), strict=True))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=L > 1, enable_gqa=True)
        return self.o(out.transpose(1, 2).reshape(B, L, -1)), (k, v)


class Layer(nn.Module):
    """Attention and a gated MLP, each after an RMS norm."""

    def __init__(self, w):
        super().__init__()
        self.norm, self.norm_mlp = nn.RMSNorm(w.hidden), nn.RMSNorm(w.hidden)
        self.attention = Attention(w)
        self.gate = nn.Linear(w.hidden, w.intermediate, bias=False)
        self.up = nn.Linear(w.hidden, w.intermediate, bias=False)
        self.down = nn.Linear(w.intermediate, w.hidden, bias=False)

    def forward(self, x, cos, sin, cache):
        out, cache = self.attention(self.norm(x), cos, sin, cache)
        x = x + out
        h = self.norm_mlp(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h)), cache


class SmallLlama(nn.Module):
    """forward(ids [B, L], cos, sin [L, D/2], caches) -> last logits [B, vocab], caches."""

    def __init__(self, w):
        super().__init__()
        self.embed = nn.Embedding(w.vocab, w.hidden)
        self.layers = nn.ModuleList(Layer(w) for _ in range(w.layers))
        self.norm = nn.RMSNorm(w.hidden)
        self.head = nn.Linear(w.hidden, w.vocab, bias=False)

    def forward(self, ids, cos, sin, caches=None):
        x, filled = self.embed(ids), []
        for i, layer in enumerate(self.layers):
            x, cache = layer(x, cos, sin, None if caches is None else caches[i])
            filled.append(cache)
        return self.head(self.norm(x[:, -1])), filled


def build(w, *, device, dtype, seed=0):
    """The model in eval mode, with the projections described above."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = SmallLlama(w).to(dtype).eval().requires_grad_(False)
    g = torch.Generator(device).manual_seed(seed)
    half = w.D // 2
    slow = torch.arange(w.D, device=device) % half >= int(SLOW * half)
    size = torch.where(slow, GAIN**0.5, 0.5) / w.hidden**0.5
    for layer in model.layers:
        attention = layer.attention
        key = torch.randn(w.Hkv, w.D, w.hidden, generator=g, device=device) * size[:, None]
        query = key.repeat_interleave(w.Hq // w.Hkv, 0)
        noise = torch.randn(w.Hq, w.D, w.hidden, generator=g, device=device)
        query = query + 0.2 * noise * size[:, None]
        attention.k.weight.copy_(key.flatten(0, 1))
        attention.q.weight.copy_(query.flatten(0, 1))
    return model


def rotations(first, L, D, device):
    """cos, sin [L, D/2] fp32 of the positions from `first` on."""
    rope = Rope(first + L, D, device)
    return rope.cos[first:].contiguous(), rope.sin[first:].contiguous()


def topic_prompt(L, *, topics=8, seed=0, device):
    """[1, L] token ids: stretches of one token each, of `topics` tokens in all."""
    g = torch.Generator(device).manual_seed(seed)
    kind = torch.randint(topics, (-(-L // SEGMENT),), generator=g, device=device)
    return (100 + 7 * kind).repeat_interleave(SEGMENT)[None, :L].contiguous()
