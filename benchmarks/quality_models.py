"""Real models whose attention asks a Switch which selection to use."""

import contextlib
import dataclasses
import functools

import torch
import torch.nn.functional as F
from capture_qk import attention as windowed
from quality_measures import Kept, kept_map
from torch.nn.attention.flex_attention import flex_attention

import crisp_flex
from crisp_flex import flex_hop, torch_internals
from crisp_flex.demo.errors import DemoError
from crisp_flex.demo.model import load

NAME = "crisp_flex_quality"


def open_model(text, *, device, dtype, adapter=None, rope_theta=None):
    """The model that `text` names: smollm2, gemma3=PATH, or a path; with an adapter merged.

    Raises:
        DemoError: gemma3 without its file, which is joined from several packages.
    """
    name, equals, path = text.partition("=")
    if not equals:
        name, path = ("smollm2", None) if text == "smollm2" else (None, text)
    if text == "gemma3":
        raise DemoError("gemma3 needs its file: --models gemma3=PATH (see capture_qk.py --help)")
    loaded = load(path, device=device, dtype=dtype)
    if adapter is not None or rope_theta is not None:
        import long_context_model

        if adapter is not None:
            long_context_model.merge(loaded.model, adapter)
        if rope_theta is not None:
            length = loaded.model.config.max_position_embeddings
            long_context_model.set_rope(loaded.model, theta=rope_theta, length=length)
    return dataclasses.replace(loaded, name=name or loaded.name)


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

        self.selection, self.kept, self.recall = None, None, False
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
            out = windowed(query, key, value, scale, window)
        else:
            out = self._sparse(module.layer_idx, query, key, value, scale)
        return out.transpose(1, 2).contiguous(), None

    def _sparse(self, layer, query, key, value, scale):
        chosen = self.selection
        if chosen.select is not None:
            block_mask = chosen.select(query, key, value, layer)
        else:
            block_mask = crisp_flex.route(query, key, chosen.config, scale=scale)
        self.kept.add(layer, query, key, block_mask, scale, recall=self.recall)
        return self._attend(query, key, value, block_mask, scale)
