"""A guard that a user sets on what selection leaves out: warn, or stop, above max_uncovered.

`on_violation="dense"` needs nothing here: the route op itself keeps all blocks of such a head, on
the device. "warn" and "raise" read two numbers a call back, so that Python can speak: the host
waits for the selection of each attention call.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from crisp_flex.config import CrispConfig
from crisp_flex.errors import UncoveredError, UncoveredWarning
from crisp_flex.routing.params import STAT_NAMES

COVERAGE = STAT_NAMES.index("coverage")


@dataclass(frozen=True, slots=True)
class UncoveredGuard:
    """What `crisp_flex::check_uncovered` is told.

    Args:
        max_uncovered: Largest mass that may be left out, in [0, 1].
        on_violation: "warn" or "raise".
        where: The attention call, for the text.
        switch: What makes this one call dense, for the text.
    """

    max_uncovered: float
    on_violation: str
    where: str
    switch: str

    @classmethod
    def of(
        cls, config: CrispConfig, where: str, *, site: str | int | None = None
    ) -> UncoveredGuard | None:
        """The guard of a call under config; None where nothing has to be read back.

        Args:
            config: Of the call.
            where: What to call it.
            site: Its key in `overrides` (path or number); None for a call of a plain function.
        """
        if config.on_violation == "dense" or config.policy == "dense":
            return None
        key = f'"{site}"' if isinstance(site, str) else site
        switch = 'policy="dense"' if site is None else f'overrides={{{key}: {{"enabled": False}}}}'
        return cls(float(config.max_uncovered), config.on_violation, where, switch)

    def as_args(self) -> tuple[float, str, str, str]:
        """The values in the order of the op's schema."""
        return self.max_uncovered, self.on_violation, self.where, self.switch


torch.library.define(
    "crisp_flex::check_uncovered",
    "(Tensor kv_num_blocks, Tensor stats, float max_uncovered, str on_violation, str where, "
    "str switch) -> Tensor",
    # it reads a number back: a CUDA graph cannot be captured across it
    tags=(
        torch.Tag.pt2_compliant_tag,
        torch.Tag.needs_fixed_stride_order,
        torch.Tag.cudagraph_unsafe,
    ),
)


def check_uncovered(kv_num_blocks: Tensor, stats: Tensor, guard: UncoveredGuard) -> Tensor:
    """A copy of kv_num_blocks, after a look at the mass that stats says is left out.

    Args:
        kv_num_blocks: [B, Hq, Nq] int32; attention takes the copy, so that the check is no dead
            code in a graph.
        stats: [B, Hq, len(STAT_NAMES)] fp32 of the route op; 1 - coverage is the mass left out on
            the rows that were measured. Two numbers are read back. NaN is above every limit.
        guard: The limit, and what happens above it.

    Raises:
        UncoveredError: A head leaves out more, and guard.on_violation is "raise".
    """
    result: Tensor = torch.ops.crisp_flex.check_uncovered.default(
        kv_num_blocks, stats, *guard.as_args()
    )
    return result


@torch.library.impl("crisp_flex::check_uncovered", ("cpu", "cuda"))
def _check_uncovered(
    kv_num_blocks: Tensor,
    stats: Tensor,
    max_uncovered: float,
    on_violation: str,
    where: str,
    switch: str,
) -> Tensor:
    if stats.numel():
        uncovered = 1 - stats[..., COVERAGE]
        most, heads = torch.stack(
            (uncovered.max(), (~(uncovered <= max_uncovered)).sum().float())
        ).tolist()
        if heads:
            text = describe_violation(where, int(heads), most, max_uncovered, switch)
            if on_violation == "raise":
                raise UncoveredError(text)
            warnings.warn(text, UncoveredWarning, stacklevel=2)
    return kv_num_blocks.clone()


@torch.library.register_fake("crisp_flex::check_uncovered")
def _check_uncovered_fake(
    kv_num_blocks: Tensor,
    stats: Tensor,
    max_uncovered: float,
    on_violation: str,
    where: str,
    switch: str,
) -> Tensor:
    return torch.empty_like(kv_num_blocks)


def describe_violation(
    where: str, heads: int, most: float, max_uncovered: float, switch: str
) -> str:
    """The sentence of a violation: where, how many heads, how much, and what to do.

    Args:
        where: The attention call.
        heads: Above the limit.
        most: Largest mass that one of them leaves out, NaN where that is not known.
        max_uncovered: The limit.
        switch: What makes this one call dense.

    Example:
        >>> print(describe_violation("layers.3", 2, 0.25, 0.1, 'policy="dense"'))
        layers.3: 2 heads leave out up to 25.0 % of the attention mass, more than \
max_uncovered=0.1: use preset="accurate", on_violation="dense", or policy="dense"
    """
    them = f"{heads} head{'s' if heads != 1 else ''}"
    verb = f"leave{'s' if heads == 1 else ''} out"
    if math.isnan(most):
        return (
            f"{where}: {them} {verb} a share of the attention mass that is not a number: look for "
            f"NaN or infinity in the model's activations, or use {switch}"
        )
    percent = f"{most:.1%}".replace("%", " %")
    return (
        f"{where}: {them} {verb} up to {percent} of the attention mass, more than "
        f'max_uncovered={max_uncovered:g}: use preset="accurate", on_violation="dense", or {switch}'
    )
