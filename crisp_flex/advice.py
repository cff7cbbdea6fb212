"""What a user can do about each Reason, by its name; "" where staying dense is right."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_MASK = (
    "hand the model attention_mask=None or a 2-D padding mask, or export what it computes as a "
    "case for the project"
)

ADVICE: Mapping[str, str] = MappingProxyType(
    {
        "DISABLED": "drop enabled=False from the config or its overrides",
        "NESTED_GRAPH": "switch gradient checkpointing off, and compile the outermost model",
        "NOT_FOUR_DIMENSIONAL": "reshape to [B, H, L, D] before the call",
        "NOT_PLAIN_TENSOR": "call with plain tensors, outside of vmap and nested tensors",
        "NO_SHAPES": "compile through torch.compile or crisp_flex.compile",
        "UNBACKED_SHAPE": "take lengths from shapes, not from .item()",
        "HAS_DROPOUT": "call model.eval(), or set dropout to 0",
        "NEEDS_GRAD": "call it under torch.no_grad()",
        "UNSUPPORTED_DEVICE": 'move the model: model.to("cuda")',
        "CPU_LACKS_FLEX": "run it on a CUDA GPU",
        "NO_COMPILER": "install what the reason names; crisp-flex doctor checks it",
        "NOT_COMPILED": "report it with the error's text; until then the call stays dense",
        "UNSUPPORTED_DTYPE": "load the model in bfloat16",
        "MIXED_DTYPES": "cast query, key and value to one dtype",
        "HEAD_DIM": "",
        "BATCH_MISMATCH": "expand query, key and value to one batch size",
        "HEADS_MISMATCH": "pass enable_gqa=True with Hq a multiple of Hkv",
        "SCALE_UNKNOWN": "pass scale as a Python number",
        "DECODE": "",
        "NOT_CAUSAL": "",
        "MASK_WITH_CAUSAL": "pass attn_mask or is_causal, not both",
        "LENGTHS_DIFFER": "pass a mask that says where the queries stand among the keys",
        "FLOAT_MASK": "pass a boolean mask, True where a key is seen",
        "MASK_IS_INPUT": "let the model compute its mask: pass a 2-D attention_mask or none",
        "MASK_NOT_CAUSAL": "",
        "MASK_OFFSET": "use transformers' own cache classes, whose positions are read",
        "MASK_WINDOW": "make the window a Python number of the model's config, at least 1",
        "MASK_CHUNKS": (
            "number chunks once, as `position // size` with an integer size, on the query's device"
        ),
        "MASK_DOCUMENTS": (
            "pass one integer id a token, on the query's device, or position_ids that start again "
            "with each document; else run the documents one by one"
        ),
        "MASK_KV_LIMIT": "cut the keys to the cache's filling before the call",
        "MASK_DEVICE": "move it first, as in attention_mask.to(model.device)",
        "MASK_UNREAD": _MASK,
        "CPU_SINKS": "run it on a CUDA GPU",
        "CAP_UNKNOWN": "pass the soft cap as a positive Python number",
        "CPU_DYNAMIC_PADDING": "compile with dynamic=False, or pad to one length",
        "NO_SELECTION_KERNEL": (
            "use bfloat16 or float16, blocks of 64 or 128, and D up to 128 (256 with 160 KB of "
            "shared memory); min_seqlen=... makes plain PyTorch choose from that length on"
        ),
        "TOO_SHORT": "nothing, or a smaller CrispConfig(min_seqlen=...) to see it run",
    }
)


def backend_ignored(backend: str) -> str:
    """What to do about a CUDA kernel that was asked for by name, where the tensors are on the CPU.

    Args:
        backend: "flash" or "triton", as in CrispConfig.
    """
    return (
        f'backend="{backend}" changes nothing on the CPU, which has one kernel: move the model '
        'with model.to("cuda"), or leave backend out'
    )
