"""Attention calls to capture, and a capture that keeps the Dynamo graph."""

import torch
import torch.nn.functional as F


def capture(fn, *args, dynamic=None, **kwargs):
    """The one Dynamo graph of fn(*args); it is run once as it is."""
    graphs = []

    def backend(gm, example_inputs):
        graphs.append(gm)
        return gm.forward

    torch.compile(fn, backend=backend, dynamic=dynamic, fullgraph=True)(*args, **kwargs)
    return graphs[-1]


def causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def causal_mask(q, k, v):
    """A mask as transformers builds it for a plain prompt: index comparison, heads repeated."""
    B, _Hq, L, _ = q.shape
    mask = position_mask(B, L, k.shape[2], q.device)
    return F.scaled_dot_product_attention(q, *repeat_kv(q, k, v), attn_mask=mask)


def padded_mask(q, k, v, attention_mask):
    """As with a 2-D attention_mask from a tokenizer."""
    B, _, L, _ = q.shape
    mask = position_mask(B, L, k.shape[2], q.device)
    batch = torch.arange(B, device=q.device)[:, None, None, None]
    key = torch.arange(k.shape[2], device=q.device)[None, None, None, :]
    mask = mask & attention_mask.to(torch.bool)[batch, key]
    return F.scaled_dot_product_attention(q, *repeat_kv(q, k, v), attn_mask=mask)


def position_mask(B, Lq, Lkv, device, offset=0):
    query = torch.arange(Lq, device=device)[None, None, :, None] + offset
    key = torch.arange(Lkv, device=device)[None, None, None, :]
    return (key <= query).expand(B, -1, Lq, Lkv)


def repeat_kv(q, k, v):
    B, Hkv, L, _D = k.shape
    G = q.shape[1] // Hkv
    return tuple(
        x[:, :, None, :, :].expand(B, Hkv, G, L, x.shape[3]).reshape(B, Hkv * G, L, x.shape[3])
        for x in (k, v)
    )


def targets(gm):
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


def large_masks(gm, L):
    """Nodes that stand for an [.., L, L] tensor."""
    return [
        node
        for node in gm.graph.nodes
        if isinstance(value := node.meta.get("example_value"), torch.Tensor)
        and tuple(value.shape[-2:]) == (L, L)
    ]
