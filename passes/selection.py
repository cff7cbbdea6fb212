"""What chooses a site's blocks, and whether the site is better left dense for want of a kernel."""

from __future__ import annotations

import dataclasses

import torch

from crisp_flex.config import BLOCK_SIZE, CrispConfig
from crisp_flex.passes.placement import Placement
from crisp_flex.report import Reason, Rejection
from crisp_flex.routing.ops import has_kernels
from crisp_flex.routing.params import RouteParams


def selection(q: torch.Tensor, k: torch.Tensor, params: RouteParams, *, listed: bool) -> str:
    """What runs crisp_flex::route for a call: "kernels" (Triton), "reference" (plain PyTorch).

    Args:
        q: [B, Hq, Lq, D], a fake tensor.
        k: [B, Hkv, Lkv, D].
        params: Of the call.
        listed: The call's lists need no routing (a window, documents): then "".
    """
    if listed:
        return ""
    return "kernels" if q.device.type == "cuda" and has_kernels(q, k, params) else "reference"


def lacks_kernels(
    q: torch.Tensor, k: torch.Tensor, placed: Placement, asked: CrispConfig, config: CrispConfig
) -> Rejection | None:
    """Why a call on CUDA stays dense: its policy has kernels, but none for this call.

    `min_seqlen` is where selection by kernels pays; it says nothing about plain PyTorch. A user who
    sets it, or takes settings for which there are no kernels at all, has decided otherwise.

    Args:
        q: [B, Hq, Lq, D], a fake tensor.
        k: [B, Hkv, Lkv, D].
        placed: The call's mask.
        asked: What the user set for this site.
        config: The same, settled.
    """
    listed = placed.window is not None or placed.same is not None
    if q.device.type != "cuda" or listed or asked.min_seqlen is not None:
        return None
    D, sizes = int(q.shape[3]), config.tokens_per_block
    params = RouteParams.from_config(config, D=D, scale=1.0)
    if has_kernels(q, k, params) or not _settings_have_kernels(params):
        return None
    return Rejection(
        Reason.NO_SELECTION_KERNEL, f"{q.dtype}, blocks of {sizes[0]} and {sizes[1]} tokens, D={D}"
    )


def _settings_have_kernels(params: RouteParams) -> bool:
    """Whether there are kernels for the policy and its numbers, on tensors that suit them best."""
    x = torch.empty(1, 1, BLOCK_SIZE[0], 64, dtype=torch.bfloat16, device="meta")
    block_q, block_kv = BLOCK_SIZE
    return has_kernels(x, x, dataclasses.replace(params, block_q=block_q, block_kv=block_kv))
