"""The kernels of policy "bounded" beside the eager reference, and where rounding may decide."""

import dataclasses

import torch

from crisp_flex.routing import reference
from crisp_flex.routing.estimate import estimate
from crisp_flex.routing.geometry import Geometry, take_rows
from crisp_flex.routing.kernels import dispatch
from crisp_flex.routing.kernels.estimate import estimate as estimate_kernel
from crisp_flex.routing.kernels.layout import Layout
from crisp_flex.routing.kernels.pool import pool_queries
from crisp_flex.routing.lines import always
from crisp_flex.routing.output_error import output_error
from crisp_flex.routing.params import STAT_NAMES
from crisp_flex.routing.policies import bounded
from crisp_flex.routing.pool import pool
from tests.routing.inputs import SHAPES, key_mask, params, structured
from tests.routing.kernels.compare import DECISION_BUDGET, Doubt, check_results, close

# Of an output error over its bound: block outputs and weights are rounded to the inputs' dtype.
_ERROR_BUDGET = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}
# Of the mass kept, whose weights are rounded likewise.
# Of a mass near its level, relative to it: the mean query is rounded to the inputs' dtype, and what
# lies in the middle may go either way.
_LEVEL_BUDGET = {torch.float32: DECISION_BUDGET, torch.float16: 1e-3, torch.bfloat16: 5e-3}
_CHANGES = {"policy": "bounded", "max_error": 0.3, "audit_rows": 2}
_KEPT_BUDGET = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}


def bounded_case(name, *, dtype=torch.float32, Dv=None, device="cpu", seed=0, **changes):
    """query, key, value, key_valid, params of a shape of inputs.SHAPES under policy "bounded"."""
    Lq, Lkv, B, Hq, Hkv, D, block, mask = SHAPES[name]
    query, key = structured(B, Hq, Hkv, Lq, Lkv, D, seed=seed, dtype=dtype)
    gen = torch.Generator().manual_seed(5)
    value = torch.randn(B, Hkv, Lkv, Dv or D, generator=gen).to(dtype)
    settings = params(D, block, **{**_CHANGES, **changes})
    valid = key_mask(mask, B, Lkv)
    tensors = (query, key, value, valid)
    return *(x if x is None else x.to(device) for x in tensors), settings


def check_estimate(query, key, key_valid, settings):
    """Assert that the estimated masses of the kernel are the reference's."""
    g = Geometry.of(query, key, key_valid, settings)
    layout = Layout.of(query, key, key_valid, settings)
    mean_query = pool(query, key, g)[0].contiguous()
    close(pool_queries(query, layout), mean_query)
    # the same means, since fp32 that differs in its last bit may be rounded to another neighbour
    logs = estimate_kernel(mean_query, key, layout, scale=settings.scale)
    logs = logs.masked_fill(~g.visible, float("-inf")).double() * torch.log(torch.tensor(2.0))
    got = logs.softmax(-1).nan_to_num(0.0).float()
    close(got, estimate(mean_query, key, g, settings.scale))


def doubt(query, key, value, key_valid, settings, share, q_offset=None):
    """The Doubt of a call whose heads left out share [B, Hq] (0: nothing)."""
    g = Geometry.of(query, key, key_valid, settings, q_offset)
    mass = estimate(pool(query, key, g)[0], key, g, settings.scale)
    rest = bounded.tail_mass(mass)
    blocks, distinct = g.audit_blocks(settings.audit_rows)
    shares = torch.tensor(bounded.LEFT_OUT, device=query.device)[:, None]
    tail, forced = (take_rows(x, blocks)[:, :, :, None] for x in (rest, always(g)))
    kept = (bounded.keep_above(tail, shares) | forced) & take_rows(g.visible, blocks)[:, :, :, None]
    budget = _LEVEL_BUDGET[query.dtype]
    unsure = _near(take_rows(mass, blocks)[:, :, :, None], tail, shares, budget) & ~forced
    measured = output_error(
        query, key, value, kept, g, scale=settings.scale, blocks=blocks, distinct=distinct
    )
    bound = measured.norm.mean(1)[:, None, None] * settings.max_error**2
    close_call = (measured.error - bound).abs() <= _ERROR_BUDGET[query.dtype] * bound
    close_call &= measured.error != bound
    # [B, Hq, C]: a candidate whose blocks or whose error rounding may change
    unclear = close_call | unsure.any(-1).any(2)
    sparser = shares.T[None] >= share[..., None]  # those that were looked at
    block = _near(mass, rest, share[..., None, None], budget) & ~always(g)
    return Doubt(block & g.visible, (unclear & sparser).any(-1), torch.zeros_like(share))


def _near(mass, rest, share, budget):
    """Where rounding may decide: the sum lost is near the share, or the mass near the level."""
    dropped = torch.where(rest <= share, mass, 0.0).amax(-1, keepdim=True)
    by_level = ((mass - dropped).abs() <= budget * dropped) & (mass > dropped)
    by_sum = (rest - share).abs() <= DECISION_BUDGET + budget * mass
    return (by_sum & (share > 0)) | by_level


def check_bounded(query, key, value, key_valid, settings, q_offset=None):
    """Assert that the kernels' lists and statistics are the reference's; the shares left out."""
    assert dispatch.supports(query.half(), key.half(), settings)
    got = dispatch.route(query, key, key_valid, settings, q_offset, value)
    want = reference.route(query, key, key_valid, settings, q_offset, value)
    share = want[3][..., STAT_NAMES.index("multiple")]
    unclear = doubt(query, key, value, key_valid, settings, share, q_offset)
    unclear.mass += _KEPT_BUDGET[query.dtype]
    Nkv = -(-key.shape[2] // settings.block_kv)
    check_results(got, want, unclear, Nkv, most_unclear=0.05)
    return share


def accurate(settings, max_error):
    """settings with another bound."""
    return dataclasses.replace(settings, max_error=max_error)
