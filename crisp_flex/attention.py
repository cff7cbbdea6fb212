"""The routing as plain functions, for people who call FlexAttention themselves."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from crisp_flex import flex_hop, head_groups, last_rows, toolchain, torch_internals
from crisp_flex.check_arguments import config_of
from crisp_flex.check_inputs import check_inputs, warn_of_gradients
from crisp_flex.config import CrispConfig
from crisp_flex.dense_attention import dense_attention
from crisp_flex.errors import InputError
from crisp_flex.graph_run import run_of
from crisp_flex.report import SiteReport
from crisp_flex.routing import ops
from crisp_flex.routing.geometry import partial_slots
from crisp_flex.routing.params import RouteParams
from crisp_flex.uncovered import UncoveredGuard, check_uncovered

# Kinds of calls that did not compile, and what to say of them.
_not_compiled: dict[tuple[Any, ...], str] = {}


class _NotCompiledError(Exception):
    """A call of one kind does not compile here."""


def route(
    query: Tensor,
    key: Tensor,
    config: CrispConfig | None = None,
    *,
    scale: float | None = None,
    key_valid: Tensor | None = None,
    value: Tensor | None = None,
) -> BlockMask:
    """The blocks that each query block attends to, as a BlockMask for `flex_attention`.

    Causal, aligned to the last key: query i sees keys 0 .. i + Lkv - Lq (a whole prompt, or a chunk
    after a cache). `min_seqlen` does not apply here.

    Args:
        query: [B, Hq, Lq, D], float32, float16 or bfloat16.
        key: [B, Hkv, Lkv, D], same dtype and device, Hq a multiple of Hkv, Lkv >= Lq.
        config: Policy and block sizes; None takes the defaults.
        scale: Factor on the logits; None is 1/sqrt(D).
        key_valid: [B, Lkv] bool, False where a key is padding.
        value: [B, Hkv, Lkv, Dv]; only the policy "bounded" needs it.

    The table of all heads is made at once: 25 % of the size of K and V at 128k tokens, 32 / 8 heads
    and D 128, growing with the length. `sparse_attention` goes by head groups instead.

    Returns:
        BlockMask of shape (B, Hq, Lq, Lkv) whose mask_mod is the exact causal (and padding) mask;
        its lists ascend within a row and hold the diagonal block of every row that sees anything.

    Raises:
        InputError: Shapes, dtypes or devices do not fit together, or the policy needs the values.

    Source: CRISP, arXiv 2609.01925; the policies "hybrid" and "bounded" are our own
    (README, How it works).
    """
    check_inputs(query, key, key if value is None else value, key_valid)
    config = config_of(config, "route") or CrispConfig()
    config = flex_hop.settle(config, query, key, captures=False)
    params = RouteParams.from_config(config, D=query.shape[3], scale=scale)
    if params.reads_values and value is None:
        raise InputError(
            f'route: policy "{params.policy}" looks at the values, too: pass value=, [B, Hkv, Lkv, '
            "Dv], or choose another policy"
        )
    guard = UncoveredGuard.of(config, "crisp_flex.route")
    if guard is not None:
        params = dataclasses.replace(params, max_uncovered=1.0)
    counts, buffer, full_counts, stats = ops.route(query, key, key_valid, params, value=value)
    if guard is not None:
        counts = check_uncovered(counts, stats, guard)
    Lq, Lkv = query.shape[2], key.shape[2]
    Nkv = -(-Lkv // params.block_kv)
    P = partial_slots(params.block_q, params.block_kv, Lq, Lkv, key_valid is not None)
    mask_mod: Any = flex_hop.causal_mod
    if key_valid is not None or Lq != Lkv:
        # a tensor, since a number would be a recompile per length; per batch, since FLASH cannot
        # index by a constant
        offset = torch.full((query.shape[0],), Lkv - Lq, dtype=torch.int32, device=key.device)
        mask_mod = _causal(offset) if key_valid is None else _padded(offset, key_valid)
    return BlockMask(
        seq_lengths=(Lq, Lkv),
        kv_num_blocks=counts,
        kv_indices=buffer[..., :Nkv],
        full_kv_num_blocks=full_counts,
        full_kv_indices=buffer[..., P:],
        q_num_blocks=None,
        q_indices=None,
        full_q_num_blocks=None,
        full_q_indices=None,
        BLOCK_SIZE=(params.block_q, params.block_kv),
        mask_mod=mask_mod,
    )


def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    config: CrispConfig | None = None,
    scale: float | None = None,
    key_valid: Tensor | None = None,
) -> Tensor:
    """Causal attention over the kept blocks; dense SDPA below `config.min_seqlen` queries.

    Above 64k keys on CUDA the heads are computed in groups (`head_groups`), which bounds the memory
    of the block lists.

    Args:
        query: [B, Hq, Lq, D], float32, float16 or bfloat16.
        key: [B, Hkv, Lkv, D], Hq a multiple of Hkv, Lkv >= Lq; query i sees keys 0 .. i + Lkv - Lq.
        value: [B, Hkv, Lkv, Dv].
        config: Policy, block sizes and min_seqlen; None takes the defaults.
        scale: Factor on the logits; None is 1/sqrt(D).
        key_valid: [B, Lkv] bool, False where a key is padding. A query that sees no key gives 0.

    Returns:
        [B, Hq, Lq, Dv], dtype of query. No gradients.

    Raises:
        InputError: Shapes, dtypes or devices do not fit together.
        ConfigError: config is no CrispConfig.

    Warns:
        UserWarning: An input requires gradients; the result is detached from it.

    Source: the kept blocks are computed by FlexAttention, arXiv 2412.05496.
    """
    check_inputs(query, key, value, key_valid)
    warn_of_gradients(query, key, value)
    config = config_of(config, "sparse_attention") or CrispConfig()
    config = flex_hop.settle(config, query, value, captures=False)
    with torch.no_grad():
        if query.shape[2] < config.least_tokens:
            return dense_attention(query, key, value, key_valid, scale)
        if problem := toolchain.missing(query.device.type):
            toolchain.warn_once(f"{problem}. Until then sparse_attention is dense")
            return dense_attention(query, key, value, key_valid, scale)
        try:
            return _grouped(query, key, value, config, scale, key_valid)
        except _NotCompiledError as error:
            toolchain.warn_once(f"{error}, so sparse_attention is dense for such calls")
            return dense_attention(query, key, value, key_valid, scale)


def _grouped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: CrispConfig,
    scale: float | None,
    key_valid: Tensor | None,
) -> Tensor:
    """Attention over the kept blocks, in head groups; the last blocks apart where they can be."""
    count = head_groups.count_groups_of(
        query,
        key,
        value,
        block_size=config.tokens_per_block,
        has_key_valid=key_valid is not None,
    )
    apart = key_valid is None and last_rows.are_apart(query, key, value, config)
    listed = dataclasses.replace(config, dense_last_blocks=0) if apart else config
    with _recorded(config, apart):
        if count == 1:
            out = _sparse(query, key, value, listed, scale, key_valid)
        else:
            out = _empty_like(query, Dv=value.shape[3])
            for group in head_groups.split_heads(count, Hq=query.shape[1], Hkv=key.shape[1]):
                heads = slice(group.q_start, group.q_end)
                k, v = (x[:, group.kv_start : group.kv_end] for x in (key, value))
                out[:, heads] = _sparse(query[:, heads], k, v, listed, scale, key_valid)
    if apart:
        factor = scale if scale is not None else query.shape[3] ** -0.5
        numbers = (config.tokens_per_block[0], config.dense_last_blocks)
        torch.ops.crisp_flex.write_last_rows(out, query, key, value, factor, *numbers)
    return out


def _recorded(config: CrispConfig, apart: bool) -> contextlib.AbstractContextManager[None]:
    """Joins the route calls of one attention call for who records them."""
    if not ops.watched():
        return contextlib.nullcontext()
    site = SiteReport(
        index=0,
        node="sparse_attention",
        module_path="",
        shapes="",
        mask="causal",
        last_blocks_apart=config.dense_last_blocks if apart else 0,
        max_uncovered=config.max_uncovered,
        on_violation=config.on_violation,
    )
    return run_of(None, (site,))


def _sparse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: CrispConfig,
    scale: float | None,
    key_valid: Tensor | None,
) -> Tensor:
    """Attention over the kept blocks of all given heads; config is settled."""
    block_mask = route(query, key, config, scale=scale, key_valid=key_valid, value=value)
    kernel = flex_hop.choose_kernel(
        query.device,
        query.dtype,
        D=query.shape[3],
        Dv=value.shape[3],
        block_size=config.tokens_per_block,
        backend=config.backend,
        captures=False,  # what mask_mod reads are inputs here, not values of a graph
    )
    options = flex_hop.kernel_options(
        kernel,
        device=query.device,
        dtype=query.dtype,
        D=query.shape[3],
        divisible=False,
        user=config.kernel_options,
        block_size=config.tokens_per_block,
    )
    del options["OUTPUT_LOGSUMEXP"], options["OUTPUT_MAX"]  # set by flex_attention itself
    kind = (
        query.dtype,
        query.device,
        (query.shape[1], key.shape[1], query.shape[3], value.shape[3]),
        config.tokens_per_block,
        (key_valid is not None, query.shape[2] == key.shape[2]),
        scale,
        tuple(sorted(options.items())),
    )
    if kind in _not_compiled:
        raise _NotCompiledError(_not_compiled[kind])
    try:
        out: Tensor = _compiled_flex(kind)(query, key, value, block_mask, scale, options)
    except torch_internals.COMPILE_ERRORS as error:
        said = str(error).partition("\n")[0]
        _not_compiled[kind] = (
            toolchain.diagnose(query.device.type) or f"Inductor could not compile ({said})"
        )
        raise _NotCompiledError(_not_compiled[kind]) from error
    return out


def _empty_like(query: Tensor, *, Dv: int) -> Tensor:
    """Empty [B, Hq, Lq, Dv] with its dims in memory in the order that query's have."""
    order = sorted(range(3), key=query.stride, reverse=True)
    return torch.empty_permuted(
        (*query.shape[:3], Dv), (*order, 3), dtype=query.dtype, device=query.device
    )


@functools.cache
def _compiled_flex(kind: tuple[Any, ...]) -> Any:  # noqa: ANN401
    # One compiled function a kind of call: past its limit of recompilations Dynamo would run
    # flex_attention as it is, which ignores the block lists. Within a kind the lengths become
    # dynamic, and fullgraph makes the limit an error.
    return torch_internals.compile_apart(_flex, "inductor", fullgraph=True)


def _flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_mask: BlockMask,
    scale: float | None,
    options: dict[str, Any],
) -> Tensor:
    attend: Any = flex_attention  # its overloads take literal options only
    out: Tensor = attend(
        query,
        key,
        value,
        block_mask=block_mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        kernel_options=options,
    )
    return out


def _causal(offset: Tensor) -> Any:  # noqa: ANN401
    def causal(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        return q_idx + offset[b] >= kv_idx

    return causal


def _padded(offset: Tensor, key_valid: Tensor) -> Any:  # noqa: ANN401
    def causal_padded(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        return (q_idx + offset[b] >= kv_idx) & key_valid[b, kv_idx.to(torch.int64)]

    return causal_padded
