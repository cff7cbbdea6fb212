"""The kernels' results beside the eager reference's, and where rounding may decide otherwise."""

from dataclasses import dataclass

import torch

from crisp_flex.routing import reference
from crisp_flex.routing.geometry import Geometry, take_rows
from crisp_flex.routing.kernels import route as kernels
from crisp_flex.routing.kernels.layout import Layout
from crisp_flex.routing.kernels.masses import masses
from crisp_flex.routing.kernels.probe import probe
from crisp_flex.routing.lines import Lines, always, cover, slash_anchors, vertical_anchors
from crisp_flex.routing.params import STAT_NAMES
from crisp_flex.routing.policies import hybrid
from crisp_flex.routing.pool import pooled_map

MASS_BUDGET = 1e-5
# A value this close to its threshold, relative to it, may fall on either side.
DECISION_BUDGET = 1e-4


@dataclass
class Doubt:
    """Where fp32 may decide otherwise."""

    # [B, Hq, Nq, Nkv] bool: a block, given what the head chose
    block: torch.Tensor
    # [B, Hq] bool: what the head chooses, its multiple or its route
    head: torch.Tensor
    # [B, Hq] fp32: mass of doubtful blocks on the rows that coverage is measured on
    mass: torch.Tensor


def kept(result, Nkv):
    """[B, Hq, Nq, Nkv] int8 of a route result: 0 not listed, 1 partial, 2 full. Checks lists."""
    counts, buffer, full_counts, _ = result
    P = buffer.shape[-1] - Nkv
    partial = _members(buffer[..., :P], counts, Nkv)
    full = _members(buffer[..., P:], full_counts, Nkv)
    assert not (partial & full).any()
    return partial.to(torch.int8) + 2 * full.to(torch.int8)


def _members(lists, counts, Nkv):
    """[..., Nkv] bool: what the first counts [...] entries of ascending lists [..., slots] name."""
    slots = torch.arange(lists.shape[-1], device=lists.device)
    used = slots < counts[..., None]
    blocks = torch.where(used, lists, Nkv)
    assert (counts <= lists.shape[-1]).all()
    assert ((blocks >= 0) & (blocks <= Nkv)).all()
    assert (~used | (lists < Nkv)).all()
    assert (blocks.diff(dim=-1) > 0).logical_or(~used[..., 1:]).all(), "a list does not ascend"
    out = torch.zeros(*counts.shape, Nkv + 1, dtype=torch.bool, device=lists.device)
    return out.scatter_(-1, blocks.long(), True)[..., :Nkv]


def doubt(query, key, key_valid, params, multiple, q_offset=None):
    """The Doubt of a call whose heads chose multiple [B, Hq], by the eager stages."""
    g = Geometry.of(query, key, key_valid, params, q_offset)
    measured = reference.probe(query, key, g, scale=params.scale, audit_rows=params.audit_rows)
    estimate = pooled_map(*reference.pool(query, key, g), g.visible, params.scale)
    rows = hybrid._Rows(estimate, hybrid._row_floor(estimate, g), always(g), g.visible, None)
    blocks = measured.audit_blocks
    audited = hybrid._Rows(
        **{
            name: take_rows(getattr(rows, name), blocks)
            for name in ("estimate", "floor", "always", "visible")
        },
        blocks=blocks,
    )
    verticals = line_floor(measured.p_v, *vertical_anchors(g))
    slashes = line_floor(measured.p_s, *slash_anchors(g))
    head = torch.zeros_like(measured.c_struct, dtype=torch.bool)
    mass = torch.zeros_like(measured.c_struct)
    block = torch.zeros_like(estimate, dtype=torch.bool)
    for value in hybrid.MULTIPLES:
        lines = Lines(
            near(measured.p_v, 2 * value * verticals), near(measured.p_s, 2 * value * slashes)
        )
        unclear = near(audited.estimate, value * audited.floor) | cover(lines, g, blocks)
        slack = (measured.audit_mass * unclear).sum(-1).amax(-1)
        keep = hybrid._keep(audited, measured, g, torch.full_like(mass, value))
        reached = hybrid._reduce_coverage(keep, measured, params.coverage_reduce)
        target = params.coverage + hybrid._COVERAGE_MARGIN
        head |= (reached - target).abs() < DECISION_BUDGET + slack
        chosen = multiple == value
        mass = torch.where(chosen, slack, mass)
        unclear = near(estimate, value * rows.floor) | cover(lines, g)
        block |= chosen[..., None, None] & unclear
    return Doubt(block & g.visible, head, mass)


def line_floor(p, anchor, entry):
    """[B, Hq, 1]: the floor of lines of mass p [B, Hq, Nkv]."""
    others = entry & ~anchor
    mean = (p * others).sum(-1, keepdim=True) / others.sum(-1, keepdim=True).clamp(min=1)
    return mean.maximum(1 / (1024 * entry.sum(-1, keepdim=True).clamp(min=1)))


def near(value, threshold):
    """Where rounding may decide. Not at equality: what is alone is exactly its own mean in fp32."""
    return ((value - threshold).abs() <= DECISION_BUDGET * threshold) & (value != threshold)


def check_route(query, key, key_valid, params, q_offset=None):
    """Assert that the kernels' lists and statistics are the reference's; returns the lists' map."""
    got = kernels.route(query, key, key_valid, params, q_offset)
    want = reference.route(query, key, key_valid, params, q_offset)
    multiple = want[3][..., STAT_NAMES.index("multiple")]
    unclear = doubt(query, key, key_valid, params, multiple, q_offset)
    Nkv = -(-key.shape[2] // params.block_kv)
    return check_results(got, want, unclear, Nkv, most_unclear=0.01)


def check_results(got, want, unclear, Nkv, *, most_unclear):
    """Assert that two route results are one but for what is in doubt; returns got's map.

    Args:
        got: Of the kernels.
        want: Of the reference.
        unclear: Doubt of the call.
        Nkv: Key blocks.
        most_unclear: Share of blocks that may be in doubt at all.
    """
    assert [(x.shape, x.dtype) for x in got] == [(x.shape, x.dtype) for x in want]
    got_kept, want_kept = kept(got, Nkv), kept(want, Nkv)
    got_stats, want_stats = (
        dict(zip(STAT_NAMES, x[3].unbind(-1), strict=True)) for x in (got, want)
    )
    decided = ~unclear.head
    assert decided.float().mean() >= 0.5, "too few heads are clear of their thresholds"
    share = unclear.block.float().mean()
    assert share < most_unclear, "too few blocks are clear of their thresholds"
    differs = (got_kept != want_kept) & ~unclear.block & decided[..., None, None]
    assert differs.nonzero().tolist() == []
    assert torch.equal(got_stats["visible_blocks"], want_stats["visible_blocks"])
    assert torch.equal(got_stats["kept_blocks"], (got_kept > 0).sum((-2, -1)).float())
    assert (got_stats["c_struct"] - want_stats["c_struct"]).abs().max() < MASS_BUDGET
    for name in ("multiple", "route"):
        assert torch.equal(got_stats[name][decided], want_stats[name][decided]), name
    error = (got_stats["coverage"] - want_stats["coverage"]).abs()
    assert (error <= MASS_BUDGET + unclear.mass)[decided].all()
    return got_kept


def check_masses(query, key, key_valid, params):
    """Assert that the masses of the kernels are those of the reference."""
    g = Geometry.of(query, key, key_valid, params)
    want = reference.probe(query, key, g, scale=params.scale, audit_rows=params.audit_rows)
    layout = Layout.of(query, key, key_valid, params)
    sums = probe(query, key, layout, scale=params.scale, audit_rows=params.audit_rows)
    got = masses(sums, layout, audit_rows=params.audit_rows)
    audits, planes = got.mass.split([params.audit_rows, layout.planes], 2)
    close(audits, want.audit_mass)
    close(planes.sum(2), want.p_v)
    close(slashes(planes, layout, g), want.p_s)
    close(got.c_struct, want.c_struct)


def slashes(planes, layout, g):
    """[B, Hq, Nkv]: the masses by distance bin of planes [B, Hq, planes, Nkv]; brute force."""
    B, _, count, Nkv = planes.shape
    out = torch.zeros_like(planes[:, :, 0])
    first = g.end - min(128, layout.Lq)
    for b in range(B):
        base = int(first[b % len(first)]) // layout.block_kv
        for J in range(Nkv):
            for c in range(count):
                if 0 <= base - J + c - 1 < Nkv:
                    out[b, :, base - J + c - 1] += planes[b, :, c, J]
                else:
                    assert (planes[b, :, c, J] == 0).all()
    return out


def close(got, want):
    error = (got - want).abs().max().item()
    assert error < MASS_BUDGET, f"differs by {error:.1e}"
