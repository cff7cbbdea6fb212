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
LENGTHS = {f"{n}k": 1024 * n for n in (8, 16, 32, 64, 128, 256, 512)}


def tokens(text):
    """A length as the command line spells it: "8k" is 8192, "4133" is itself."""
    return 1024 * int(text[:-1]) if text.endswith("k") else int(text)


def spelled(length):
    """A length as people read it: 8192 is "8k", 4133 is itself."""
    return str(length) if length % 1024 else f"{length // 1024}k"


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
