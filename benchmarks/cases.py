"""The shapes, named after the models they come from; the only place with numbers."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Heads:
    """Attention heads of one layer."""

    Hq: int
    Hkv: int
    D: int


HEADS = {
    "llama-3.1-8b": Heads(32, 8, 128),
    "qwen2-0.5b": Heads(14, 2, 64),
    "gemma-3-4b": Heads(16, 4, 256),
    "smollm2-135m": Heads(9, 3, 64),
}
LENGTHS = {"8k": 8192, "16k": 16384, "32k": 32768, "64k": 65536, "128k": 131072}

# a 32-layer Llama-shaped random model, small in width so that compiling dominates
COMPILE_MODEL = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 1 << 17,
}
