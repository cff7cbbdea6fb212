"""attn_implementation="crisp_flex" for transformers: the way in for models that refuse SDPA.

Gemma 2 caps its logits and gpt-oss has sinks, so transformers gives their graphs no SDPA call. The
function registered here makes one call that says all of it, which the passes rewrite. A model that
writes its own attention (Bloom, MPT: ALiBi) asks no registry, and one that is told something else
(a position bias, chosen keys) would be computed wrongly: both are refused in a sentence.

Block selection reads q and k alone. A soft cap is monotone, so the order of a row's logits is that
of the capped ones, but it flattens them: the coverage that the audit reports is that of the
uncapped logits, and can be above the capped one where logits come near the cap. (Gemma 2: cap 50;
a logit of 10 becomes 9.87.) A sink takes mass that no key holds, so the error by keys left out is
at most what the audit says.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from crisp_flex import huggingface_op

NAME = "crisp_flex"

# Families that refuse SDPA and, on this route, equal their eager attention
# (tests/test_huggingface.py). Others may do more to their masks than hand them on: DeepSeek-V4
# appends keys to them.
_COMPARED = frozenset({"gemma2", "gpt_oss", "granite_swa", "granitemoe_swa", "flint"})
# What transformers hands to every attention function and changes no logit here: positions and
# packed lengths are in the mask.
_SILENT = frozenset(
    {"position_ids", "cache_position", "position_embeddings", "hidden_states", "seq_idx"}
    | {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "cu_seqlens"}
    | {"token_type_ids", "mm_token_type_ids"}
)


def register() -> str:
    """Register the name "crisp_flex" with transformers, for attention and for masks.

    Both, since without a mask function transformers hands over no mask at all, and padding would
    be ignored. The masks are those that SDPA gets, so what holds for an SDPA model holds here; a
    model that would misread them raises NotImplementedError when it is called.
    Uncompiled, a model on this route computes dense attention; `crisp_flex.compile` makes its long
    prompts sparse.

    Returns:
        The name, for `attn_implementation=` or `model.set_attn_implementation(...)`.

    Raises:
        ImportError: transformers is not installed, or older than 4.53 (no mask registry).

    Example:
        >>> name = crisp_flex.huggingface.register()
        >>> model = AutoModelForCausalLM.from_pretrained(path, attn_implementation=name)
        >>> crisp_flex.compile(model)
    """
    transformers = importlib.import_module("transformers")
    masks = importlib.import_module("transformers.masking_utils")
    transformers.AttentionInterface.register(NAME, attention_forward)
    masks.AttentionMaskInterface.register(NAME, _mask_function())
    return NAME


@functools.cache  # one function: Dynamo guards on it
def _mask_function() -> Callable[..., Tensor | None]:
    """The masks that SDPA gets, of a model that hands them on to `attention_forward`."""
    sdpa_mask = importlib.import_module("transformers.masking_utils").sdpa_mask

    def mask(*args: Any, config: Any = None, **kwargs: Any) -> Tensor | None:  # noqa: ANN401
        problem = _cannot_serve(getattr(config, "model_type", ""))
        if problem:
            raise NotImplementedError(problem)
        made: Tensor | None = sdpa_mask(*args, config=config, **kwargs)
        return made

    return mask


@torch.compiler.assume_constant_result
def _cannot_serve(model_type: str) -> str:
    """Why a family cannot take this route and what to load it with, "" if nothing is known."""
    model = _model_class(model_type)
    if model is None:  # of the user's own
        return ""
    takes_sdpa = bool(getattr(model, "_supports_sdpa", False))
    instead = f'load it with attn_implementation="{"sdpa" if takes_sdpa else "eager"}"'
    if not getattr(model, "_supports_attention_backend", True):
        return (
            f"{model.__name__} writes its own attention and never asks for "
            f'attn_implementation="{NAME}": {instead}'
        )
    if not takes_sdpa and model_type not in _COMPARED:
        return (
            f"{model.__name__} refuses SDPA, and nobody has compared "
            f'attn_implementation="{NAME}" with its own attention: {instead}'
        )
    return ""


def _model_class(model_type: str) -> Any:  # noqa: ANN401
    auto = importlib.import_module("transformers.models.auto")
    config = dict(auto.configuration_auto.CONFIG_MAPPING_NAMES).get(model_type)
    mappings = (auto.MODEL_FOR_CAUSAL_LM_MAPPING, auto.MODEL_MAPPING)
    for mapping in mappings if config is not None else ():
        known = auto.CONFIG_MAPPING[model_type]
        if known in mapping:
            found = mapping[known]
            return found[0] if isinstance(found, tuple) else found
    return None


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,  # noqa: ANN401
) -> tuple[Tensor, None]:
    """The attention of one layer, as transformers' AttentionInterface calls it.

    Args:
        module: The layer; its `is_causal` counts where no mask is given.
        query: [B, Hq, Lq, D].
        key: [B, Hkv, Lkv, D], heads not repeated.
        value: [B, Hkv, Lkv, Dv].
        attention_mask: What `sdpa_mask` returns: [B, 1, Lq, Lkv] bool, or None. A mask of the
            caller's own may be additive.
        scaling: Factor on q @ k^T; None is 1/sqrt(D).
        dropout: Must be 0 with a soft cap or sinks.
        is_causal: Overrides the module's.
        softcap: Cap on the logits, or None.
        s_aux: [Hq] sinks, or None.
        **kwargs: Not read: positions and windows are in the mask.

    Returns:
        [B, Lq, Hq, Dv] contiguous, and None for the weights.

    Raises:
        NotImplementedError: kwargs has a tensor that says more about the logits, such as a
            position_bias.
    """
    unknown = [name for name, given in kwargs.items() if isinstance(given, Tensor)]
    if unknown := [name for name in unknown if name not in _SILENT]:
        raise NotImplementedError(
            f'attn_implementation="{NAME}" does not know what {type(module).__name__} means by '
            f'{", ".join(unknown)}: load it with attn_implementation="sdpa", or "eager" where it '
            "refuses SDPA"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(causal) and attention_mask is None and query.shape[2] > 1
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    if softcap is None and s_aux is None:
        out = torch.nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attention_mask,
            dropout_p=dropout,
            is_causal=causal,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    elif dropout:
        raise NotImplementedError(
            'attn_implementation="crisp_flex" has no dropout with a soft cap or sinks: set '
            'attention_dropout=0, call model.eval(), or train with attn_implementation="eager"'
        )
    elif torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (query, key, value, s_aux)
    ):
        first = 0 if causal else None
        args = (query, key, value, attention_mask, s_aux, first, scale, softcap)
        out = huggingface_op.formula(*args)
    else:
        out = torch.ops.crisp_flex.attention.default(
            query, key, value, attention_mask, s_aux, causal, scale, softcap
        )
    return out.transpose(1, 2).contiguous(), None
