"""Inputs on which a good sparse result and the dense one agree, whatever blocks are chosen.

Every query puts more than 99 % of its attention on a few heavy key columns. Blocks are chosen from
query and key only, so a change of value where a row must not look leaves that row bit-identical.
"""

import torch
import torch.nn.functional as F

from crisp_flex import CrispConfig

LENGTH = 512
# A third of the mass lies in one of so few blocks, more than the default coverage lets go.
CONFIG = CrispConfig(
    min_seqlen=256, block_size=(64, 64), coverage=0.999, coverage_reduce="min", audit_rows=8
)


def qkv(B=1, Hq=4, Hkv=None, Lq=LENGTH, Lkv=None, D=32, Dv=None, columns=(0.0, 0.37, 0.71), seed=0):
    """query, key, value with heavy key columns at the given fractions of Lkv."""
    gen = torch.Generator().manual_seed(seed)
    Hkv, Lkv, Dv = Hkv or Hq, Lkv or Lq, Dv or D
    direction = F.normalize(torch.randn(D, generator=gen), dim=0)
    query = 0.3 * torch.randn(B, Hq, Lq, D, generator=gen)
    key = 0.3 * torch.randn(B, Hkv, Lkv, D, generator=gen)
    value = torch.randn(B, Hkv, Lkv, Dv, generator=gen)
    strength = (16 * D**0.5) ** 0.5
    query += strength * direction
    for column in columns:
        key[:, :, round(column * (Lkv - 1))] += strength * direction
    return query, key, value


class Sdpa(torch.nn.Module):
    """A model that is one SDPA call; options are given here or at the call."""

    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, query, key, value, **options):
        return F.scaled_dot_product_attention(query, key, value, **self.options, **options)


def dense(query, key, value, **options):
    """Plain eager SDPA."""
    gqa = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=gqa, **options)


def band(Lq, Lkv=None):
    """Boolean causal mask of the last Lq of Lkv positions, as a tensor that a user makes."""
    Lkv = Lkv or Lq
    return torch.ones(Lq, Lkv, dtype=torch.bool).tril(Lkv - Lq)
