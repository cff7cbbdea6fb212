"""The smallest set of entries that holds a share of the mass, and a given number of the largest."""

from __future__ import annotations

import torch
from torch import Tensor


def top_mass(mass: Tensor, share: float) -> Tensor:
    """[..., N] bool: the largest entries of mass [..., N] until they hold share of its sum.

    Of equal entries the lower index wins.
    """
    ordered, order = mass.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    enough = share * mass.sum(-1, keepdim=True)
    return torch.zeros_like(mass, dtype=torch.bool).scatter(-1, order, before < enough)


def top_count(mass: Tensor, entry: Tensor, count: int | Tensor) -> Tensor:
    """[..., N] bool: the count largest of mass [..., N] among entry; count a number or [..., 1].

    Of equal entries the lower index wins.
    """
    order = torch.where(entry, mass, -1.0).sort(dim=-1, descending=True, stable=True).indices
    chosen = torch.arange(mass.shape[-1], device=mass.device) < count
    kept = torch.zeros_like(mass, dtype=torch.bool)
    return kept.scatter(-1, order, chosen.expand(mass.shape)) & entry
