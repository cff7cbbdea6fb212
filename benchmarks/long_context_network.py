"""A Llama's forward with projections passed in, for training at 64k tokens and for prefixes shared.

Weights come from a Transformers model and stay frozen. The four attention projections of a layer
are arguments, so that gradients reach the adapter that made them. Everything but attention works on
[tokens, hidden] whatever the batch, so that torch.compile serves all lengths with one graph.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

# For few queries and a mask; cuDNN would plan anew for every length.
MASKED = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class Layer:
    """Frozen weights of one layer, and the projections it came with (q, k, v, o)."""

    norm: torch.Tensor
    norm_mlp: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    projections: tuple


def rms_norm(x, weight, eps):
    """In fp32, as Transformers does it."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)


def turn(x, cos, sin):
    """RoPE of [T, H, D]; cos, sin [T, 1, D/2]."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def before_attention(x, norm, q, k, v, cos, sin, eps, D):
    """x [T, hidden] -> queries [T, Hq, D], keys and values [T, Hkv, D]."""
    h = rms_norm(x, norm, eps)
    q, k, v = (F.linear(h, w).unflatten(-1, (-1, D)) for w in (q, k, v))
    return turn(q, cos, sin), turn(k, cos, sin), v


def after_attention(x, attended, o, norm, gate, up, down, eps):
    """The layer's rest: residual, norm and MLP. attended [T, Hq * D]."""
    x = x + F.linear(attended, o)
    h = rms_norm(x, norm, eps)
    return x + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)


def causal(q, k, v):
    """Attention [B, H, L, D]; torch picks the kernel."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Network:
    """See the module. attend: causal attention of [B, H, L, D]; compiled: compile the rest."""

    def __init__(self, model, *, theta, attend=causal, compiled=False):
        config = model.config
        self.eps, self.theta, self.attend = config.rms_norm_eps, theta, attend
        self.Hq, self.Hkv = config.num_attention_heads, config.num_key_value_heads
        self.D = getattr(config, "head_dim", None) or config.hidden_size // self.Hq
        body = model.model
        self.embed, self.norm = body.embed_tokens.weight.detach(), body.norm.weight.detach()
        self.head = model.lm_head.weight.detach()
        self.layers = [_layer(layer) for layer in body.layers]
        self.before, self.after = before_attention, after_attention
        if compiled:
            self.before = torch.compile(before_attention, dynamic=False)
            self.after = torch.compile(after_attention, dynamic=False)

    @property
    def projections(self):
        """Those of the model as it came, a tuple (q, k, v, o) a layer."""
        return [layer.projections for layer in self.layers]

    def hidden(self, ids, projections, *, on_keys=None):
        """Hidden states [B, L, hidden] before the last norm.

        Args:
            ids: [B, L] int64.
            projections: (q, k, v, o) a layer, in the dtype of the weights.
            on_keys: Called with (k, v) [B, Hkv, L, D] of each layer in turn.
        """
        B, L = ids.shape
        cos, sin = self._rotations(torch.arange(L, device=ids.device).repeat(B))

        def attention(_, q, k, v):
            if on_keys:
                on_keys(k, v)
            return self.attend(q, k, v)

        # without gradients lengths vary, and each would be compiled anew
        trained = torch.is_grad_enabled()
        halves = (self.before, self.after) if trained else (before_attention, after_attention)
        return self._run(ids, projections, cos, sin, attention, halves)

    def follow(self, ids, projections, caches):
        """Hidden states [N, S, hidden] of N continuations that share one prefix of P tokens.

        Args:
            ids: [N, S] int64, each row right after the prefix.
            projections: As for `hidden`.
            caches: (k, v) [1, Hkv, P, D] a layer.
        """
        N, S = ids.shape
        P = caches[0][0].shape[2]
        cos, sin = self._rotations(torch.arange(P, P + S, device=ids.device).repeat(N))
        seen = torch.ones(S, P + S, dtype=torch.bool, device=ids.device).tril(P)

        def attention(index, q, k, v):
            k, v = (
                torch.cat([cache.expand(N, -1, -1, -1), x], 2)
                for cache, x in zip(caches[index], (k, v), strict=True)
            )
            k, v = (x.repeat_interleave(self.Hq // self.Hkv, 1) for x in (k, v))
            with sdpa_kernel(MASKED):
                return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)

        plain = (before_attention, after_attention)
        return self._run(ids, projections, cos, sin, attention, plain)

    def logits(self, hidden):
        """[..., hidden] -> fp32 [..., vocabulary]."""
        return F.linear(rms_norm(hidden, self.norm, self.eps), self.head).float()

    def _rotations(self, positions):
        """cos, sin [T, 1, D/2] in the weights' dtype."""
        exponent = torch.arange(0, self.D, 2, device=positions.device).float() / self.D
        angle = positions.float()[:, None, None] * (1.0 / self.theta**exponent)
        return angle.cos().to(self.embed.dtype), angle.sin().to(self.embed.dtype)

    def _run(self, ids, projections, cos, sin, attention, halves):
        before, after = halves
        B, L = ids.shape
        x = F.embedding(ids.flatten(), self.embed)
        # or the first layer would need a compiled graph of its own
        x.requires_grad_(torch.is_grad_enabled())
        for index, (layer, (wq, wk, wv, wo)) in enumerate(
            zip(self.layers, projections, strict=True)
        ):
            q, k, v = before(x, layer.norm, wq, wk, wv, cos, sin, self.eps, self.D)
            q, k, v = (t.unflatten(0, (B, L)).transpose(1, 2) for t in (q, k, v))
            out = attention(index, q, k, v).transpose(1, 2).reshape(B * L, self.Hq * self.D)
            x = after(
                x, out, wo, layer.norm_mlp, layer.gate, layer.up, layer.down, self.eps
            )  # fmt: skip
        return x.unflatten(0, (B, L))


def _layer(layer):
    attention, mlp = layer.self_attn, layer.mlp
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    return Layer(
        norm=layer.input_layernorm.weight.detach(),
        norm_mlp=layer.post_attention_layernorm.weight.detach(),
        gate=mlp.gate_proj.weight.detach(),
        up=mlp.up_proj.weight.detach(),
        down=mlp.down_proj.weight.detach(),
        projections=tuple(getattr(attention, name).weight.detach() for name in names),
    )
