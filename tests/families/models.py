"""Tiny random models, one a family, and the calls that people make of them."""

from dataclasses import dataclass, field

import torch
import transformers

import crisp_flex.huggingface

LENGTH = 96
WINDOW = 24
VOCABULARY = 128

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,  # large enough for the masks to matter
}
# A setting that the family's config does not take.
UNSET = object()
_MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

# family: (class of its config, settings beside _SIZES)
FAMILIES = {
    "Llama": ("LlamaConfig", {}),
    "Mistral": ("MistralConfig", {"sliding_window": None}),
    "Mistral, window": ("MistralConfig", {"sliding_window": WINDOW}),
    "Qwen2": ("Qwen2Config", {"num_attention_heads": 6, "hidden_size": 96}),
    "Qwen3": ("Qwen3Config", {}),
    "Qwen3-MoE": ("Qwen3MoeConfig", _EXPERTS),
    "Gemma 3 text": ("Gemma3TextConfig", _MIXED),
    "Phi 3": ("Phi3Config", {}),
    "Phi 3, window": ("Phi3Config", {"sliding_window": WINDOW}),
    "Cohere 2": ("Cohere2Config", _MIXED),
    "Granite": ("GraniteConfig", {}),
    "OLMo 2": ("Olmo2Config", {}),
    "SmolLM3": ("SmolLM3Config", {}),
    "Falcon": (
        "FalconConfig",
        {"new_decoder_architecture": False, "alibi": False, "head_dim": UNSET},
    ),
    "StarCoder 2": ("Starcoder2Config", {}),
    "GPT-NeoX": ("GPTNeoXConfig", {}),
    "GPT-2": ("GPT2Config", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}),
    "DeepSeek-V3": (
        "DeepseekV3Config",
        {
            "head_dim": 8,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
        },
    ),
    "Llama 4 text": (
        "Llama4TextConfig",
        {
            "layer_types": ["chunked_attention", "full_attention"],
            "attention_chunk_size": 32,
            "num_local_experts": 2,
            "intermediate_size_mlp": 64,
            "no_rope_layers": [1, 0],
        },
    ),
    "Qwen2.5-VL text": (
        "Qwen2_5_VLTextConfig",
        {"rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3]}},
    ),
    # a cap low enough to matter
    "Gemma 2": ("Gemma2Config", {**_MIXED, "attn_logit_softcapping": 0.5}),
    "gpt-oss": (
        "GptOssConfig",
        {**_MIXED, "num_local_experts": 2, "num_experts_per_tok": 2, "rope_parameters": _ROPE},
    ),
}
# These refuse SDPA (a soft cap on the logits, sinks): attn_implementation="crisp_flex".
WITHOUT_SDPA = ("Gemma 2", "gpt-oss")


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a model: its arguments, and which rows of the result people read."""

    kwargs: dict
    rows: torch.Tensor = field(default_factory=lambda: torch.ones(1, 1, dtype=torch.bool))


def make(family, *, attention=None, **changes):
    """The tiny model of a family, in eval mode; attention is its attn_implementation."""
    config_class, settings = FAMILIES[family]
    chosen = {**_SIZES, **settings, **changes}
    sizes = {name: value for name, value in chosen.items() if value is not UNSET}
    config = getattr(transformers, config_class)(**sizes)
    torch.manual_seed(0)
    if attention is None:
        attention = crisp_flex.huggingface.register() if family in WITHOUT_SDPA else "sdpa"
    if config_class == "Qwen2_5_VLTextConfig":
        model = transformers.models.qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VLTextModel
        return model._from_config(config, attn_implementation=attention).eval()
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model.eval()


def ids(length=LENGTH, batch=1, seed=0):
    """[batch, length] token ids."""
    gen = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=gen)


def ones(length, batch=1):
    """An attention_mask without padding."""
    return torch.ones(batch, length, dtype=torch.int64)


def _padded(on_the_left):
    mask = ones(LENGTH, 2)
    mask[0, : 21 if on_the_left else None] = 0
    if not on_the_left:
        mask[0] = 1
        mask[0, -21:] = 0
    return mask


def _after(model, past, *, static, seed=5):
    """A cache with past tokens in it."""
    cache = _cache(model, static)
    with torch.no_grad():
        model(input_ids=ids(past, seed=seed), past_key_values=cache, use_cache=True)
    return cache


def _cache(model, static):
    if static:
        return transformers.StaticCache(config=model.config, max_cache_len=LENGTH + 96)
    return transformers.DynamicCache(config=model.config)


def _padded_call(on_the_left):
    mask = _padded(on_the_left)
    return Call(
        {"input_ids": ids(batch=2), "attention_mask": mask, "use_cache": False}, mask.bool()
    )


def _later(model, past, tokens, *, static, masked):
    kwargs = {"input_ids": ids(tokens), "past_key_values": _after(model, past, static=static)}
    if masked:
        kwargs["attention_mask"] = ones(past + tokens)
    return Call(kwargs)


# call: a function of the model
CALLS = {
    "plain": lambda model: Call({"input_ids": ids(), "use_cache": False}),
    "ones mask": lambda model: Call(
        {"input_ids": ids(), "attention_mask": ones(LENGTH), "use_cache": False}
    ),
    "left padding": lambda model: _padded_call(True),
    "right padding": lambda model: _padded_call(False),
    "dynamic cache": lambda model: Call(
        {"input_ids": ids(), "past_key_values": _cache(model, static=False)}
    ),
    "static cache": lambda model: Call(
        {
            "input_ids": ids(),
            "attention_mask": ones(LENGTH),
            "past_key_values": _cache(model, static=True),
        }
    ),
    "chunk": lambda model: _later(model, 64, 64, static=False, masked=False),
    "second turn": lambda model: _later(model, 83, 49, static=False, masked=True),
    "static second turn": lambda model: _later(model, 83, 49, static=True, masked=True),
    "decode": lambda model: _later(model, 64, 1, static=False, masked=False),
}
