"""Stage `output_error`: how far a selection moves the attention output, on a few exact query rows.

A selection renormalises the softmax over the keys that it keeps. Its output is a quotient of two
sums over the kept blocks, so the exact sums of each block serve all candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from crisp_flex.routing.geometry import Geometry
from crisp_flex.routing.probe import Rows, row_probabilities, structure_tokens

# Query rows that are looked at in each audited block, evenly spaced up to its last valid one.
SAMPLED_ROWS = 8


@dataclass(frozen=True, slots=True)
class OutputError:
    """Sums over the sampled rows r, fp32; 0 for a sequence without any (kept mass: 1).

    o_r is the exact output of row r, o_r^c that of candidate c.
    """

    # [B, Hq, C]: sum of |o_r^c - o_r|^2.
    error: Tensor
    # [B, Hq]: sum of |o_r|^2.
    norm: Tensor
    # [B, Hq, C]: exact mass that a candidate keeps, mean over the rows.
    kept_mass: Tensor
    # [B, Hq]: mass of the first and the last 128 keys, mean over the rows of the last audited block
    # (0 if there are none): CRISP's c_struct, of those rows.
    c_struct: Tensor


def output_error(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep: Tensor,
    geometry: Geometry,
    *,
    scale: float,
    blocks: Tensor,
    distinct: Tensor,
) -> OutputError:
    """Output errors of candidate selections on SAMPLED_ROWS rows of each audited query block.

    Args:
        query: [B, Hq, Lq, D], any float dtype.
        key: [B, Hkv, Lkv, D], Hq a multiple of Hkv.
        value: [B, Hkv, Lkv, Dv].
        keep: [B, Hq, m, C, Nkv] bool: the key blocks that candidate c keeps for audited block m,
            each with the first valid key among them.
        geometry: Of this call.
        scale: Factor on the logits.
        blocks: [B', m] int64 audited query blocks.
        distinct: [B', m] bool: the block counts.
    """
    g, m = geometry, blocks.shape[1]
    rows = sampled_rows(g, blocks)
    counts = rows.valid.unflatten(1, (m, -1)) & distinct[..., None]  # [B', m, R]
    number = counts.sum((1, 2))[:, None, None]
    counts = counts[:, None, :, None, :]
    last = rows.valid[:, -SAMPLED_ROWS:]
    weights = last / last.sum(-1, keepdim=True).clamp(min=1)  # [B', R]
    structure = structure_tokens(g)[:, None, None]
    if g.key_valid is not None:
        # where, not a product: what stands in padding may be NaN
        value = torch.where(g.key_valid[:, None, :, None], value, 0.0)
    G = query.shape[1] // key.shape[1]
    errors, norms, masses, structures, h = [], [], [], [], 0
    for probs in row_probabilities(query, key, rows, g, scale):
        heads = slice(h, h + probs.shape[1])
        values = value[:, h // G : (h + probs.shape[1]) // G].float()
        h += probs.shape[1]
        of_structure = (probs[:, :, -SAMPLED_ROWS:] * structure).sum(-1)
        structures.append((of_structure * weights[:, None]).sum(-1))
        by_block = _block_sums(probs, values, g).unflatten(3, (m, -1))  # [B, h, Nkv, m, R, Dv + 1]
        R, width = by_block.shape[4:]
        by_block = by_block.permute(0, 1, 3, 2, 4, 5).flatten(4)  # [B, h, m, Nkv, R * (Dv + 1)]
        kept = (keep[:, heads].float() @ by_block).unflatten(-1, (R, width))
        whole = by_block.sum(3, keepdim=True).unflatten(-1, (R, width))
        exact = whole[..., :-1] / whole[..., -1:]
        off = kept[..., :-1] / kept[..., -1:] - exact
        # where: a row that does not count may be NaN
        errors.append(torch.where(counts, off.square().sum(-1), 0.0).sum((2, 4)))
        norms.append(torch.where(counts, exact.square().sum(-1), 0.0).sum((2, 3, 4)))
        masses.append(torch.where(counts, kept[..., -1] / whole[..., -1], 0.0).sum((2, 4)))
    mean_mass = torch.cat(masses, 1) / number.clamp(min=1)
    return OutputError(
        error=torch.cat(errors, 1),
        norm=torch.cat(norms, 1),
        kept_mass=torch.where(number > 0, mean_mass, 1.0),
        c_struct=torch.cat(structures, 1),
    )


def sampled_rows(g: Geometry, blocks: Tensor) -> Rows:
    """[B', m * SAMPLED_ROWS] rows: the last valid one of each block, then backwards in even steps.

    A row counts if it is a valid query of its block.
    """
    step = max(g.block_q // SAMPLED_ROWS, 1)
    first = blocks * g.block_q + g.offset
    last = (first + (g.block_q - 1)).minimum(g.end[:, None] - 1)
    back = torch.arange(SAMPLED_ROWS, device=blocks.device) * step
    positions = last[..., None] - back  # [B', m, R]
    valid = positions >= first.maximum(g.start[:, None])[..., None]
    return Rows(positions.flatten(1), valid.flatten(1), g.Lkv)


def _block_sums(probs: Tensor, value: Tensor, g: Geometry) -> Tensor:
    """[B, h, Nkv, R, Dv + 1]: sums of probs [B, h, R, Lkv] times value, and of probs, by block."""
    B, h, R, _ = probs.shape
    Hkv = value.shape[1]
    tail = g.Nkv * g.block_kv - g.Lkv
    weights = pad(probs, (0, tail)).view(B, Hkv, (h // Hkv) * R, g.Nkv, g.block_kv).transpose(2, 3)
    with_one = pad(pad(value, (0, 1), value=1.0), (0, 0, 0, tail))
    sums = weights @ with_one.view(B, Hkv, g.Nkv, g.block_kv, -1)  # [B, Hkv, Nkv, G * R, Dv + 1]
    by_head = sums.view(B, Hkv, g.Nkv, h // Hkv, R, -1).transpose(2, 3)
    return by_head.flatten(1, 2)
