"""The flex_attention operator as graph nodes: kernel choice, options, mask functions, the call."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from crisp_flex import gpu_table, toolchain, torch_internals
from crisp_flex.config import BLOCK_SIZE, CrispConfig
from crisp_flex.errors import UnavailableError


def settle(
    config: CrispConfig, query: torch.Tensor, value: torch.Tensor, *, captures: bool
) -> CrispConfig:
    """The config of one call with numbers where `block_size` and `min_seqlen` are None.

    Args:
        config: The settings of the call.
        query: [B, Hq, Lq, D], real or of a graph; of symbolic head dims the hint is taken, with no
            guard.
        value: [B, Hkv, Lkv, Dv].
        captures: As for `choose_kernel`.
    """
    gpu, block_size = gpu_table.gpu_of(query.device), BLOCK_SIZE
    D, Dv = (torch_internals.size_hint(x.shape[-1]) for x in (query, value))
    if config.block_size is None and config.backend != "triton" and D is not None:
        best = next(iter(gpu.flash_block_sizes(D)), BLOCK_SIZE)
        fits = _flash_fits(query.device, query.dtype, D, Dv, best, captures)
        if best != BLOCK_SIZE and fits and flash_available():
            block_size = best
    return config.settled(block_size=block_size, min_seqlen=gpu.min_seqlen)


def choose_kernel(
    device: torch.device,
    dtype: torch.dtype,
    *,
    D: int,
    Dv: int,
    block_size: tuple[int, int],
    backend: str,
    captures: bool,
) -> str:
    """The FlexAttention kernel for one site: "FLASH", "TRITON" or "CPU".

    captures: mask_mod reads a tensor that the graph computes. Torch 2.11's FLASH lowering does not
    count it as an input of the kernel, and the generated code frees it too early (H200, 2026-11-30:
    `UnboundLocalError: buf2`), so such a site takes TRITON.

    FLASH (flash-attn-4) takes fp16 and bf16 on Hopper and Blackwell, and on Hopper only key blocks
    that equal the kernel's tile: gpu_table has the block sizes by head dim. Where it would be taken
    but is missing or broken, one warning says what to install.
    """
    if device.type == "cpu":
        return "CPU"
    if backend == "triton":
        return "TRITON"
    sizes = {block_size, *gpu_table.gpu_of(device).flash_block_sizes(D)}
    fits = {size: _flash_fits(device, dtype, D, Dv, size, captures) for size in sizes}
    if flash_available():
        return "FLASH" if fits[block_size] else "TRITON"
    if backend == "flash":
        raise UnavailableError(
            f'backend="flash" needs flash-attn-4. {toolchain.flash_problem()}, or use '
            'backend="auto"'
        )
    if fits[block_size] or (block_size == BLOCK_SIZE and any(fits.values())):
        toolchain.warn_once(
            f"{toolchain.flash_problem()}. Until then attention runs on TRITON, which is slower "
            'on this GPU; CrispConfig(backend="triton") chooses that without this warning'
        )
    return "TRITON"


def _flash_fits(
    device: torch.device,
    dtype: torch.dtype,
    D: int,
    Dv: int | None,
    block_size: tuple[int, int],
    captures: bool,
) -> bool:
    return (
        not captures
        and dtype in gpu_table.HALF
        and Dv == D
        and block_size in gpu_table.gpu_of(device).flash_block_sizes(D)
    )


def flash_available() -> bool:
    """Whether flash-attn-4 imports here; `toolchain.flash_problem` says why not."""
    return not toolchain.flash_problem()


def kernel_options(
    kernel: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    D: int,
    divisible: bool,
    user: Mapping[str, Any],
    block_size: tuple[int, int] = BLOCK_SIZE,
) -> dict[str, Any]:
    """The complete options of the operator; a missing key is a KeyError in the lowering.

    Args:
        kernel: "FLASH", "TRITON" or "CPU".
        device: Where the tensors are.
        dtype: Of query, key and value.
        D: Head dim of query and key.
        divisible: Both lengths are static multiples of max(128, block): the kernel's own test
            looks at 128 only and would read past the end with larger blocks.
        user: Options that win over ours.
        block_size: (query, key) tokens; TRITON's tiles must divide them.
    """
    options: dict[str, Any] = {
        # AUTO would take the decode kernel for short queries; the CPU ignores the name.
        "BACKEND": "AUTO" if kernel == "CPU" else kernel,
        "PRESCALE_QK": False,
        "ROWS_GUARANTEED_SAFE": False,
        "BLOCKS_ARE_CONTIGUOUS": False,
        "WRITE_DQ": True,
        "OUTPUT_LOGSUMEXP": False,
        "OUTPUT_MAX": False,
    }
    if not divisible:
        options["IS_DIVISIBLE"] = False
    if kernel == "TRITON":
        options.update(gpu_table.triton_options(device, dtype, D, block_size))
    return {**options, **user}


# Traced mask_mod and score_mod carry no annotations: fx copies them to the placeholders, and
# AOTAutograd's cache then fails to pickle its key.
def _keep_score(score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    return score


@functools.cache
def _capped(softcap: float) -> Callable[..., Any]:
    def capped(score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        return torch.tanh(score / softcap) * softcap

    capped.__name__ = f"softcap_{str(softcap).replace('.', '_')}"
    return capped


def causal_mod(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """mask_mod of plain causal attention with Lq == Lkv."""
    return q_idx >= kv_idx


def add_submodule(gm: fx.GraphModule, name: str, module: torch.nn.Module) -> str:
    """Register module on gm under name or the first free name_N, and return that name."""
    taken, count = name, 0
    while hasattr(gm, taken):
        count += 1
        taken = f"{name}_{count}"
    gm.register_module(taken, module)
    return taken


def flex_call(
    gm: fx.GraphModule,
    *,
    query: fx.Node,
    key: fx.Node,
    value: fx.Node,
    lists: Mapping[str, fx.Node],
    lengths: tuple[int | fx.Node, int | fx.Node],
    block_size: tuple[int, int],
    mask_mod: Callable[..., Any],
    captured: Sequence[fx.Node],
    scale: float,
    options: Mapping[str, Any],
    softcap: float | None = None,
) -> fx.Node:
    """Insert `flex_attention(...)` at gm.graph's insertion point and return it, a tuple.

    Args:
        gm: Graph to insert into; it gets the mask_mod and score_mod as submodules.
        query: [B, Hq, Lq, D].
        key: [B, Hkv, Lkv, D], not repeated.
        value: [B, Hkv, Lkv, Dv].
        lists: The four list tensors under BlockMask's names, int32, with equal strides in the two
            index lists (torch 2.11 addresses the full list with the partial list's strides).
        lengths: (Lq, Lkv), a node where symbolic.
        block_size: (query, key) tokens.
        mask_mod: One of the functions above, or any function of (b, h, q, kv, *captured) that fx
            can trace.
        captured: Tensors that mask_mod reads.
        scale: Factor on the logits.
        options: From `kernel_options`.
        softcap: Cap on the logits, TRITON and CPU only.
    """
    graph = gm.graph
    score_mod = _keep_score if softcap is None else _capped(softcap)
    score = graph.get_attr(_traced(gm, f"flex_{score_mod.__name__}", score_mod))
    mask = graph.get_attr(_traced(gm, f"flex_{mask_mod.__name__}", mask_mod))
    named: dict[str, Any] = {
        **lists,
        "mask_mod": mask,
        "Lq": lengths[0],
        "Lkv": lengths[1],
        "block_q": block_size[0],
        "block_kv": block_size[1],
    }
    block_mask = tuple(
        None if name is None else named[name] for name in torch_internals.block_mask_fields()
    )
    return graph.call_function(
        torch_internals.FLEX_ATTENTION,
        (query, key, value, score, block_mask, scale, dict(options), (), tuple(captured)),
    )


def _traced(gm: fx.GraphModule, name: str, fn: Callable[..., Any]) -> str:
    # one submodule for all sites of a graph: same name, same function
    if not isinstance(getattr(gm, name, None), fx.GraphModule):
        gm.register_module(name, fx.symbolic_trace(fn))
    return name


def region_call(graph: fx.Graph, region: str, operands: Sequence[fx.Node]) -> fx.Node:
    """Insert a call of the submodule `region`, which Inductor compiles once for all its calls."""
    body = graph.get_attr(region)
    call = graph.call_function(torch_internals.INVOKE_SUBGRAPH, (body, region, *operands))
    return graph.call_function(operator.getitem, (call, 0))


def sizes_fit_region(sizes: Iterable[int | torch.SymInt]) -> bool:
    """Whether every size is a number or one symbol: a region cannot take a size `s0 - 1`."""
    exprs = [torch_internals.size_expr(size) for size in sizes]
    return all(expr is not None and expr.is_Atom for expr in exprs)
