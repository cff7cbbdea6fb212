"""A guard that a user sets on what selection leaves out: warn, or stop, above max_uncovered.

`on_violation="dense"` needs nothing here: the route op itself keeps all blocks of such a head, on
the device. "warn" and "raise" read one number a call back, so that Python can speak: the host waits
for the selection of each attention call.
"""

from __future__ import annotations

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
    """

    max_uncovered: float
    on_violation: str
    where: str

    @classmethod
    def of(cls, config: CrispConfig, where: str) -> UncoveredGuard | None:
        """The guard of a call under config; None where nothing has to be read back."""
        if config.on_violation == "dense" or config.policy == "dense":
            return None
        return cls(float(config.max_uncovered), config.on_violation, where)

    def as_args(self) -> tuple[float, str, str]:
        """The values in the order of the op's schema."""
        return self.max_uncovered, self.on_violation, self.where


torch.library.define(
    "crisp_flex::check_uncovered",
    "(Tensor kv_num_blocks, Tensor stats, float max_uncovered, str on_violation, str where)"
    " -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order),
)


def check_uncovered(kv_num_blocks: Tensor, stats: Tensor, guard: UncoveredGuard) -> Tensor:
    """A copy of kv_num_blocks, after a look at the mass that stats says is left out.

    Args:
        kv_num_blocks: [B, Hq, Nq] int32; attention takes the copy, so that the check is no dead
            code in a graph.
        stats: [B, Hq, len(STAT_NAMES)] fp32 of the route op; 1 - coverage is the mass left out on
            the rows that were measured. One number is read back.
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
    kv_num_blocks: Tensor, stats: Tensor, max_uncovered: float, on_violation: str, where: str
) -> Tensor:
    if stats.numel():
        uncovered = 1 - stats[..., COVERAGE]
        most, heads = torch.stack(
            (uncovered.max(), (uncovered > max_uncovered).sum().float())
        ).tolist()
        if heads:
            text = describe_violation(where, int(heads), most, max_uncovered)
            if on_violation == "raise":
                raise UncoveredError(text)
            warnings.warn(text, UncoveredWarning, stacklevel=2)
    return kv_num_blocks.clone()


@torch.library.register_fake("crisp_flex::check_uncovered")
def _check_uncovered_fake(
    kv_num_blocks: Tensor, stats: Tensor, max_uncovered: float, on_violation: str, where: str
) -> Tensor:
    return torch.empty_like(kv_num_blocks)


def describe_violation(where: str, heads: int, most: float, max_uncovered: float) -> str:
    """The sentence of a violation: where, how many heads, how much, and what to do.

    Example:
        >>> print(describe_violation("layers.3", 2, 0.25, 0.1))
        layers.3: 2 heads leave out up to 25.0 % of the attention mass, more than \
max_uncovered=0.1: use preset="accurate", on_violation="dense", or \
overrides={"layers.3": {"enabled": False}}
    """
    return (
        f"{where}: {heads} head{'s' if heads != 1 else ''} leave{'s' if heads == 1 else ''} out up "
        f"to {most:.1%} of the attention mass, more than max_uncovered={max_uncovered:g}: use "
        f'preset="accurate", on_violation="dense", or overrides={{"{where}": {{"enabled": False}}}}'
    ).replace("%", " %")
