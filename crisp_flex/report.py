"""What was rewritten, what was left as it was, and why: data that tests and users read."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Reason(Enum):
    """Why a call stays as it was. The value is the sentence a user reads."""

    DISABLED = "the config switches this site off"
    NESTED_GRAPH = "the call is inside a nested graph (checkpoint, cond or a compiled region)"
    NOT_FOUR_DIMENSIONAL = "query, key and value must be [B, H, L, D]"
    NOT_PLAIN_TENSOR = (
        "query, key or value is no plain tensor (nested, sparse, distributed or under a transform)"
    )
    NO_SHAPES = "the graph does not say the shapes of query, key and value"
    UNBACKED_SHAPE = "a length is only known when the graph runs (an unbacked size)"
    HAS_DROPOUT = "dropout is on"
    NEEDS_GRAD = (
        "gradients are needed; the sparse path is for inference (call under torch.no_grad())"
    )
    UNSUPPORTED_DEVICE = "the tensors are neither on CUDA nor on the CPU"
    CPU_LACKS_FLEX = "Inductor's FlexAttention kernel does not run on this CPU (AVX2, Linux)"
    NO_COMPILER = "nothing can be compiled for this device"
    NOT_COMPILED = "Inductor raised an error on the sparse call"
    UNSUPPORTED_DTYPE = "the dtype is not float32, float16 or bfloat16"
    MIXED_DTYPES = "query, key and value have different dtypes"
    HEAD_DIM = "the head dim is outside what the sparse kernels take"
    BATCH_MISMATCH = "query, key and value have different batch sizes"
    HEADS_MISMATCH = "the query heads are no multiple of the key heads, or enable_gqa is off"
    SCALE_UNKNOWN = "the scale is computed at run time"
    DECODE = "Lq is 1: a decode step"
    NOT_CAUSAL = "no mask and not causal: every query sees every key"
    MASK_WITH_CAUSAL = "attn_mask and is_causal are both set"
    LENGTHS_DIFFER = "Lq and Lkv differ or are not known to be equal"
    FLOAT_MASK = "attn_mask is additive (a bias), not boolean"
    MASK_IS_INPUT = "attn_mask is an input of the graph, so what it says cannot be proved"
    MASK_NOT_CAUSAL = "attn_mask was read and is not causal"
    MASK_OFFSET = "attn_mask is causal, but where the queries stand among the keys is not proved"
    MASK_WINDOW = "attn_mask has a sliding window of a width that is not known"
    MASK_CHUNKS = "attn_mask separates chunks of positions in a way that is not proved"
    MASK_DOCUMENTS = "attn_mask separates packed documents in a way that is not proved"
    MASK_KV_LIMIT = "attn_mask hides keys at the end that the queries would reach"
    MASK_DEVICE = "what attn_mask was computed from is on another device than query"
    MASK_UNREAD = "a part of attn_mask could not be proved to mean anything known"
    CPU_DYNAMIC_PADDING = (
        "padding or packing with a dynamic batch or length does not compile on the CPU"
    )
    CPU_SINKS = "attention sinks need the log-sum-exp, which Inductor's CPU kernel does not give"
    CAP_UNKNOWN = "the soft cap on the logits is no positive number"
    NO_SELECTION_KERNEL = (
        "no Triton kernel chooses blocks for this call, and with plain PyTorch it was never seen "
        "to pay"
    )
    TOO_SHORT = "less work than a prompt of min_seqlen tokens"


@dataclass(frozen=True, slots=True)
class Rejection:
    """A reason with the detail of this one site.

    Args:
        reason: Why; its value is the sentence that a user reads.
        detail: What was seen here, such as "Lq=1024, Lkv=1024, min_seqlen=8192", or "".
    """

    reason: Reason
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.reason.value} ({self.detail})" if self.detail else self.reason.value


@dataclass(frozen=True, slots=True)
class SiteReport:
    """The outcome for one SDPA call.

    Args:
        index: Number of the call in its graph, from 0.
        node: Name of the node in the Dynamo graph.
        module_path: Path of the calling module, "" where Dynamo does not know it.
        shapes: Text of the shapes, such as "q[1, 9, 4096, 64] kv[1, 3, 4096, 64] bfloat16 cuda:0".
        mask: Reading of the mask, such as "causal" or "causal + padding".
        kernel: "FLASH", "TRITON" or "CPU" where the site was rewritten, else "".
        policy: Selection policy where the site was rewritten, else "".
        rejection: Why the call was left as it was; None where it was rewritten.
        head_groups: Parts that the heads are computed in, one after the other; above 1 for long
            prompts on CUDA.
        last_blocks_apart: Query blocks at the end that are computed dense by a call of their own
            (CUDA), so that the block lists do not count them.
        selection: What chooses the blocks: "kernels" (Triton), "reference" (plain PyTorch), or ""
            where nothing is chosen.
        min_seqlen: Tokens of the shortest whole prompt that this site runs sparsely; 0 if not
            known.
        max_uncovered: The site's limit of the attention mass left out, in [0, 1].
        on_violation: "dense", "warn" or "raise": what happens above it.
    """

    index: int
    node: str
    module_path: str
    shapes: str
    mask: str
    kernel: str = ""
    policy: str = ""
    rejection: Rejection | None = None
    head_groups: int = 1
    last_blocks_apart: int = 0
    selection: str = ""
    min_seqlen: int = 0
    max_uncovered: float = 1.0
    on_violation: str = "dense"

    @property
    def rewritten(self) -> bool:
        """True where the call now runs sparsely."""
        return self.rejection is None

    def __str__(self) -> str:
        where = self.module_path or self.node
        if self.rejection is None:
            groups = f" in {self.head_groups} head groups" if self.head_groups > 1 else ""
            slowly = self.selection == "reference" and "cuda" in self.shapes
            chosen = ", blocks chosen by plain PyTorch (slow)" if slowly else ""
            how = f"{self.policy} on {self.kernel}{groups}{chosen}"
            return f"{where}: rewritten, {how}, {self.mask}, {self.shapes}"
        return f"{where}: left dense: {self.rejection}, {self.shapes}"


@dataclass(slots=True)
class RewriteReport:
    """The outcome for one graph, site by site.

    Args:
        sites: One SiteReport per SDPA call, in the order of the graph.
    """

    sites: list[SiteReport] = field(default_factory=list)

    @property
    def rewritten(self) -> list[SiteReport]:
        """The sites that now run sparsely."""
        return [site for site in self.sites if site.rewritten]

    @property
    def rejected(self) -> list[SiteReport]:
        """The sites that stay as they were; each has a `rejection`."""
        return [site for site in self.sites if not site.rewritten]

    def __str__(self) -> str:
        head = f"{len(self.rewritten)} of {len(self.sites)} attention calls rewritten"
        return "\n".join([head, *(f"  {site}" for site in self.sites)])
