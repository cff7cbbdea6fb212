"""SmolLM2 extended to 64k tokens: its GGUF file with an adapter of benchmarks/assets merged in.

    from long_context_model import load
    loaded = load("smol.gguf", "benchmarks/assets/smollm2-135m-64k.safetensors", device="cuda")
    loaded.model(...)

The result is an ordinary Transformers model: weights merged, RoPE theta as the adapter's file says.
"""

import dataclasses
from pathlib import Path

import torch
from long_context_adapter import NAMES, Adapter

from crisp_flex.demo.model import load as load_base

ADAPTER = Path(__file__).parent / "assets" / "smollm2-135m-64k.safetensors"


def load(gguf_path=None, adapter_path=ADAPTER, *, device="cpu", dtype=torch.float32):
    """A crisp_flex.demo.model.LoadedModel with the adapter merged.

    Args:
        gguf_path: A .gguf file or a model folder; None is the demo's SmolLM2-135M-Instruct.
        adapter_path: The adapter's safetensors file.
        device: Of the weights.
        dtype: Of the weights and activations; merged in float32 whatever it is.
    """
    source = None if gguf_path is None else str(gguf_path)
    loaded = load_base(source, device=device, dtype=dtype)
    merge(loaded.model, adapter_path)
    return dataclasses.replace(loaded, name=f"{loaded.name}-{Path(adapter_path).stem}")


def merge(model, adapter_path):
    """Merge an adapter's file into a Transformers Llama, in place, and set theta and length.

    Raises:
        ValueError: The file is of another format or for another model.
    """
    attentions = [layer.self_attn for layer in model.model.layers]
    weights = [tuple(getattr(a, f"{name}_proj").weight for name in NAMES) for a in attentions]
    adapter, facts = Adapter.read(adapter_path, weights)
    with torch.no_grad():
        for old, new in zip(weights, adapter.merged(weights), strict=True):
            for weight, changed in zip(old, new, strict=True):
                weight.copy_(changed)
    set_rope(model, theta=facts.rope_theta, length=facts.length)


def set_rope(model, *, theta, length):
    """Give a Transformers Llama another RoPE theta and longest length in tokens, in place."""
    config = model.config
    config.rope_parameters = {**config.rope_parameters, "rope_theta": theta}
    config.max_position_embeddings = max(length, config.max_position_embeddings)
    old = model.model.rotary_emb
    model.model.rotary_emb = type(old)(config).to(old.inv_freq.device)
