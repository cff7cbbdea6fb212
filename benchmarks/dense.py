"""Every dense path that a sparse result is compared with, each checked before it is timed."""

import torch
from timing import measure_within
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from crisp_flex import CrispConfig, flex_hop
from crisp_flex.bench.attention import sdpa_calls
from crisp_flex.bench.exact import BLOCK, MOST_ERROR, relative_error, wanted_rows

__all__ = [
    "BLOCK", "MOST_ERROR", "PATHS", "causal_blocks", "dense_paths", "dense_times", "flex_options",
    "kernel_of", "relative_error", "wanted_rows",
]  # fmt: skip
PATHS = ("sdpa_cudnn", "sdpa_flash", "sdpa_cpu", "flex_triton", "flex_fa4", "fa4")


def causal_blocks(L, device, block_kv=BLOCK):
    """The BlockMask of plain causal attention, made from its lists (never anything of L x L).

    Args:
        L: Tokens, a multiple of BLOCK, which is the query block.
        device: Of the lists.
        block_kv: Tokens per key block, a divisor of BLOCK.
    """
    Nq, Nkv, partial = L // BLOCK, L // block_kv, BLOCK // block_kv
    row = torch.arange(Nq, dtype=torch.int32, device=device)
    diagonal = torch.zeros(1, 1, Nq, Nkv, dtype=torch.int32, device=device)
    diagonal[..., :partial] = partial * row[:, None] + torch.arange(partial, device=device)
    before = torch.arange(Nkv, dtype=torch.int32, device=device)
    return BlockMask(
        seq_lengths=(L, L),
        kv_num_blocks=torch.full_like(row, partial)[None, None],
        kv_indices=diagonal,
        full_kv_num_blocks=(partial * row)[None, None],
        full_kv_indices=before.expand(1, 1, Nq, Nkv).contiguous(),
        q_num_blocks=None,
        q_indices=None,
        full_q_num_blocks=None,
        full_q_indices=None,
        BLOCK_SIZE=(BLOCK, block_kv),
        mask_mod=flex_hop.causal_mod,
    )


def kernel_of(query, config):
    """The kernel that crisp_flex takes for these tensors under a settled config."""
    return flex_hop.choose_kernel(
        query.device, query.dtype, D=query.shape[3], Dv=query.shape[3],
        block_size=config.tokens_per_block, backend=config.backend, captures=False,
    )  # fmt: skip


def flex_options(kernel, query, block_size):
    """Our options for the public flex_attention: those of `flex_hop`, tuned for this GPU."""
    options = flex_hop.kernel_options(
        kernel, device=query.device, dtype=query.dtype, D=query.shape[3],
        divisible=query.shape[2] % BLOCK == 0, user={}, block_size=block_size,
    )  # fmt: skip
    return {name: x for name, x in options.items() if not name.startswith("OUTPUT_")}


def dense_paths(q, k, v, skip=()):
    """{name: a call without arguments} of the dense paths to try on these tensors."""

    def flex(kernel, block_size=(BLOCK, BLOCK)):
        mask = causal_blocks(q.shape[2], q.device, block_size[1])
        options = flex_options(kernel, q, block_size)
        compiled = torch.compile(flex_attention, dynamic=False)
        return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=True, kernel_options=options)

    def fa4():
        from flash_attn.cute import flash_attn_func

        # a result, or a result and its log-sum-exp, by version
        out = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    sdpa = sdpa_calls(q, k, v)
    if q.device.type == "cpu":
        return {"sdpa_cpu": sdpa["CPU"]}
    paths = {"sdpa_cudnn": lambda: sdpa["cuDNN"], "sdpa_flash": lambda: sdpa["flash"]}
    if q.shape[2] % BLOCK == 0:
        paths["flex_triton"] = lambda: flex("TRITON")
    if flex_hop.flash_available():
        paths["fa4"] = lambda: fa4
        flash = flex_hop.settle(CrispConfig(backend="flash"), q, v, captures=False)
        if "flex_triton" in paths and kernel_of(q, flash) == "FLASH":
            paths["flex_fa4"] = lambda: flex("FLASH", flash.tokens_per_block)
    return {name: make() for name, make in paths.items() if name not in skip}


def dense_times(paths, wanted, rows, *, budget_ms):
    """{"<path>_ms": milliseconds, None where it does not run or its result is not `wanted`}."""
    times = {}
    for name, call in paths.items():
        try:
            error = relative_error(call(), wanted, rows)
            if not error < MOST_ERROR:
                print(f"  {name} is not timed: relative error {error:.2e}")
                times[f"{name}_ms"] = None
                continue
            times[f"{name}_ms"] = round(
                measure_within(call, budget_ms=budget_ms, called=True)[0], 4
            )
        except (RuntimeError, ValueError, TypeError, AssertionError) as failure:
            # a head dim or a GPU that a path does not take
            times[f"{name}_ms"] = None
            print(f"  {name} does not run: {(str(failure).splitlines() or [''])[0][:90]}")
    return times
