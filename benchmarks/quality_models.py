"""Real models whose attention asks a Switch which selection to use."""

import contextlib
import dataclasses
import functools
from pathlib import Path

import long_context_model
import quality_gemma
import torch
import torch.nn.functional as F
from capture_qk import attention as windowed
from quality_measures import Kept, kept_map
from quality_routing import Routing
from torch.nn.attention.flex_attention import flex_attention

import crisp_flex
from crisp_flex import flex_hop, torch_internals
from crisp_flex.demo.errors import DemoError
from crisp_flex.demo.model import load

NAME = "crisp_flex_quality"


def open_model(text, *, device, dtype, adapter=None, rope_theta=None):
    """The model that `text` names, with an adapter merged or another RoPE theta; its name says so.

    Args:
        text: smollm2, gemma3 (both downloaded as packages), NAME=PATH, or a path.
        device: Of the weights.
        dtype: Of the weights and activations.
        adapter: A file of long_context_adapter.py; for SmolLM2.
        rope_theta: Instead of the model's own (a Transformers Llama).

    Raises:
        DemoError: A file or a package is not there, or the adapter belongs to another model.
    """
    name, equals, path = text.partition("=")
    if not equals:
        name, path = (text, None) if text in ("smollm2", "gemma3") else (None, text)
    if name == "gemma3" and path is None:
        path = str(quality_gemma.gguf_file())
    if adapter is None:
        loaded = load(path, device=device, dtype=dtype)
        name = name or loaded.name
    else:
        loaded = _extended(path, adapter, device=device, dtype=dtype)
        name = f"{name}-{Path(adapter).stem}" if name else loaded.name
    if rope_theta is not None:
        length = loaded.model.config.max_position_embeddings
        long_context_model.set_rope(loaded.model, theta=rope_theta, length=length)
        name = f"{name}-theta{rope_theta:g}"
    return dataclasses.replace(loaded, name=name)


def _extended(path, adapter, *, device, dtype):
    if not Path(adapter).is_file():
        raise DemoError(f"There is no adapter {adapter}: train_long_context.py writes one.")
    try:
        return long_context_model.load(path, adapter, device=device, dtype=dtype)
    except (ValueError, AttributeError) as error:
        raise DemoError(
            f"The adapter {adapter} does not fit {path or 'smollm2'}: {error}"
        ) from error


@functools.cache
def _compiled(kind):
    # one compiled function a kind of call, so that no run meets the limit of recompilations
    return torch_internals.compile_apart(_call, "inductor", fullgraph=True)


def _call(query, key, value, block_mask, scale, options):
    gqa = query.shape[1] != key.shape[1]
    return flex_attention(
        query, key, value, block_mask=block_mask, scale=scale, enable_gqa=gqa,
        kernel_options=options,
    )  # fmt: skip


def compiled_flex(query, key, value, block_mask, scale):
    """Compiled FlexAttention on its TRITON kernel (Inductor's C++ kernel on the CPU)."""
    D, Dv, block_size = query.shape[3], value.shape[3], tuple(block_mask.BLOCK_SIZE)
    device, dtype = query.device, query.dtype
    kernel = flex_hop.choose_kernel(
        device, dtype, D=D, Dv=Dv, block_size=block_size, backend="triton", captures=False
    )
    options = flex_hop.kernel_options(
        kernel, device=device, dtype=dtype, D=D, divisible=False, user={}, block_size=block_size
    )
    del options["OUTPUT_LOGSUMEXP"], options["OUTPUT_MAX"]  # set by flex_attention itself
    kind = (device, dtype, query.shape[1], key.shape[1], D, Dv, block_size, scale)
    call = _compiled((*kind, block_mask.mask_mod.__code__))
    return call(query, key, value, block_mask, scale, options)


def masked(query, key, value, block_mask, scale):
    """The same by SDPA, a query block at a time: no compiler, for the CPU and for tests."""
    (bq, bkv), L = block_mask.BLOCK_SIZE, query.shape[2]
    kept, G = kept_map(block_mask), query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(G, 1) for x in (key, value))
    at, parts = torch.arange(L, device=query.device), []
    for block in range(kept.shape[2]):
        first, end = block * bq, min((block + 1) * bq, L)
        seen = kept[:, :, block].repeat_interleave(bkv, -1)[:, :, None, :end]
        seen = seen & (at[:end] <= at[first:end, None])
        rows = query[:, :, first:end]
        parts.append(
            F.scaled_dot_product_attention(
                rows, key[:, :, :end], value[:, :, :end], attn_mask=seen, scale=scale
            )
        )
    return torch.cat(parts, 2)


class Switch:
    """The attention of a model's layers: dense, or over the blocks of a selection.

    Layers with a window shorter than the prompt, and decode steps, stay dense.

    Args:
        kernel: "flex" (compiled FlexAttention) or "masked".
    """

    def __init__(self, model, *, kernel):
        from transformers import AttentionInterface

        self.selection, self.kept, self.recall, self.routing = None, None, False, None
        self._attend = compiled_flex if kernel == "flex" else masked
        # without a mask function of this name Transformers passes no mask: nothing is padded here
        AttentionInterface.register(NAME, self._forward)
        model.set_attn_implementation(NAME)

    @contextlib.contextmanager
    def using(self, selection, *, recall=False):
        """While active prompts are selected; yields the Kept that fills. None is dense."""
        self.selection, self.kept, self.recall = selection, Kept(), recall
        try:
            yield self.kept
        finally:
            self.selection, self.kept = None, None

    @contextlib.contextmanager
    def observing(self):
        """While active prompts are dense; yields the Routing that fills."""
        self.routing = Routing()
        try:
            yield self.routing
        finally:
            self.routing = None

    def _forward(self, module, query, key, value, mask, scaling=None, sliding_window=None, **_):
        L, Lkv = query.shape[2], key.shape[2]
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        window = sliding_window if sliding_window and sliding_window < Lkv else None
        if L == 1:
            if window is not None:
                key, value = key[:, :, -window:], value[:, :, -window:]
            gqa = query.shape[1] != key.shape[1]
            out = F.scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=gqa)
        elif Lkv != L:
            raise NotImplementedError("a prompt is one step here, without chunks")
        elif window is not None or self.selection is None:
            if window is None and self.routing is not None:
                self.routing.add(module.layer_idx, query, key, scale)
            out = windowed(query, key, value, scale, window)
        else:
            out = self._sparse(module.layer_idx, query, key, value, scale)
        return out.transpose(1, 2).contiguous(), None

    def _sparse(self, layer, query, key, value, scale):
        chosen = self.selection
        if chosen.select is not None:
            block_mask = chosen.select(query, key, value, layer)
        else:
            block_mask = crisp_flex.route(query, key, chosen.config, scale=scale, value=value)
        self.kept.add(layer, query, key, block_mask, scale, recall=self.recall)
        return self._attend(query, key, value, block_mask, scale)
