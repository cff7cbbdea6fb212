"""policy="bounded" against a brute-force oracle in float64, its stages, and what holds always."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
import torch

from crisp_flex.routing import estimate as estimate_module
from crisp_flex.routing import probe as probe_module
from crisp_flex.routing.estimate import estimate
from crisp_flex.routing.geometry import Geometry
from crisp_flex.routing.output_error import SAMPLED_ROWS, output_error, sampled_rows
from crisp_flex.routing.policies.bounded import LEFT_OUT, tail_mass
from crisp_flex.routing.pool import pool
from crisp_flex.routing.reference import STAT_NAMES, select_blocks
from tests.routing import oracle_bounded as oracle
from tests.routing.inputs import SHAPES, key_mask, params, structured
from tests.routing.scene import Scene

MULTIPLE, ROUTE = STAT_NAMES.index("multiple"), STAT_NAMES.index("route")
CASES = {
    **{name: SHAPES[name] for name in SHAPES if SHAPES[name][1] > 128},
    "four heads a group": (500, 500, 1, 8, 2, 32, (64, 64), "none"),
}


def values(key, Dv=24, *, seed=9):
    """[B, Hkv, Lkv, Dv]: noise, and directions that last for 48 tokens."""
    gen = torch.Generator().manual_seed(seed)
    B, Hkv, Lkv = key.shape[:3]
    topics = torch.randn(B, Hkv, -(-Lkv // 48), Dv, generator=gen).repeat_interleave(48, 2)
    return torch.randn(B, Hkv, Lkv, Dv, generator=gen) + topics[:, :, :Lkv]


def case(name, *, seed=0, **changes):
    """query, key, value, key_valid, params."""
    Lq, Lkv, B, Hq, Hkv, D, block, mask = CASES[name]
    query, key = structured(B, Hq, Hkv, Lq, Lkv, D, seed=seed)
    changes = {"policy": "bounded", "max_error": 0.13, "dense_last_blocks": 0, **changes}
    return query, key, values(key), key_mask(mask, B, Lkv), params(D, block, **changes)


def select(query, key, value, key_valid, p, q_offset=None):
    return select_blocks(query, key, key_valid, p, q_offset, value)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_brute_force(name):
    inputs = case(name)
    oracle.check(select(*inputs), *inputs)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_error": 0.03, "audit_rows": 6},
        {"max_error": 0.3, "audit_rows": 1, "dense_last_blocks": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["ragged small blocks", "left padding into a chunk", "holes"])
def test_settings_equal_the_brute_force(name, changes):
    inputs = case(name, seed=1, **changes)
    oracle.check(select(*inputs), *inputs)


def test_heads_choose_different_shares_and_a_lower_bound_keeps_more():
    pairs = [structured(1, 4, 2, 640, D=16, strength=s) for s in (0, 1, 2, 3)]
    query, key = (torch.cat(x) for x in zip(*pairs, strict=True))
    kept = []
    for max_error in (0.5, 0.13, 0.02):
        p = params(16, (64, 64), policy="bounded", max_error=max_error)
        selection = select(query, key, values(key), None, p)
        multiple = selection.stats[..., MULTIPLE]
        assert (multiple[..., None] == torch.tensor([0.0, *LEFT_OUT])).any(-1).all()
        kept.append(selection.keep)
        if max_error == 0.13:
            assert multiple.unique().numel() >= 4
    for fewer, more in pairwise(kept):
        assert (fewer & ~more).sum() == 0
        assert fewer.sum() < more.sum()


def test_a_head_that_no_share_serves_keeps_all_blocks():
    query, key = torch.zeros(1, 1, 1024, 16), torch.zeros(1, 1, 1024, 16)
    query[..., 0] = 4.0
    key[:, :, 64:704, 0] = -9.0  # ten blocks of 1e-4 of the mass each at most
    p = params(16, (64, 64), policy="bounded", audit_rows=1, dense_last_blocks=0)
    chosen = {}
    for max_error in (1e-2, 1e-5):
        p = dataclasses.replace(p, max_error=max_error)
        selection = select(query, key, values(key), None, p)
        chosen[max_error] = selection.stats[0, 0, [MULTIPLE, ROUTE]].tolist()
    assert chosen[1e-2][0] > 0
    assert chosen[1e-2][1] == 1
    assert chosen[1e-5] == [0, 3]
    assert torch.equal(selection.keep[0, 0], torch.ones(16, 16).tril().bool())


@pytest.mark.parametrize("name", ["half key blocks", "ragged chunk", "left padding", "holes"])
def test_the_estimate_is_the_softmax_over_every_key(name, monkeypatch):
    query, key, _, key_valid, p = case(name)
    g = Geometry.of(query, key, key_valid, p)
    mean_query = pool(query, key, g)[0]
    got = estimate(mean_query, key, g, p.scale)
    G = query.shape[1] // key.shape[1]
    for b in range(query.shape[0]):
        valid = np.ones(key.shape[2], bool) if key_valid is None else key_valid[b].numpy()
        for h in range(query.shape[1]):
            pair = (query[b, h].double().numpy(), key[b, h // G].double().numpy())
            s = Scene(*pair, valid, p)
            live = sorted(s.live)
            want = torch.from_numpy(oracle.estimate(s)[live])
            torch.testing.assert_close(got[b, h, live].double(), want, atol=5e-6, rtol=0)
    sums = got.sum(-1)
    torch.testing.assert_close(sums, g.visible.any(-1).expand_as(sums).float())
    for module in (estimate_module, probe_module):
        monkeypatch.setattr(module, "CHUNK_ELEMENTS", 1)
    torch.testing.assert_close(
        estimate(mean_query, key, g, p.scale), got, atol=5e-6, rtol=0, equal_nan=False
    )


def test_equal_masses_are_dropped_together_or_not_at_all():
    gen = torch.Generator().manual_seed(0)
    # sixteenths of few values, so that sums are exact in any order
    mass = torch.randint(0, 4, (5, 7, 40), generator=gen) / 16
    mass[0, 0] = 0.0625
    lost = tail_mass(mass)
    for row, got in zip(mass.view(-1, 40), lost.view(-1, 40), strict=True):
        assert got.tolist() == [float(row[row <= x].sum()) for x in row]
    mass[1, 2, 3] = torch.nan
    lost = tail_mass(mass)
    assert lost[1, 2].isnan().all()
    assert lost.isnan().sum() == 40


def test_equal_blocks_stay_together():
    query = torch.zeros(1, 1, 1024, 16)
    value = torch.randn(1, 1, 1, 16).expand(1, 1, 1024, 16)  # any selection is exact
    p = params(16, (64, 64), policy="bounded", dense_last_blocks=0)
    keep = select(query, query, value, None, p).keep[0, 0]
    rows = torch.arange(16)
    # all 16 equal blocks weigh 1 > .6 together: none is dropped
    assert torch.equal(keep, rows <= rows[:, None])
    # the far blocks weigh less by half a unit of logits each, so the first ones go
    key = torch.zeros(1, 1, 1024, 16)
    key[..., 0] = torch.arange(16).repeat_interleave(64) // 2 * 2.0
    query[..., 0] = 2.0
    keep = select(query, key, value, None, p).keep[0, 0]
    assert keep[15].nonzero().flatten().tolist() == [0, 13, 14, 15]


@pytest.mark.parametrize("name", ["half key blocks", "left padding into a chunk", "right padding"])
def test_sampled_rows_are_those_of_the_brute_force(name):
    query, key, _, key_valid, p = case(name, audit_rows=20)
    g = Geometry.of(query, key, key_valid, p)
    blocks, distinct = g.audit_blocks(p.audit_rows)
    rows = sampled_rows(g, blocks)
    counts = rows.valid & distinct.repeat_interleave(SAMPLED_ROWS, 1)
    for b in range(rows.positions.shape[0]):
        valid = np.ones(key.shape[2], bool) if key_valid is None else key_valid[b].numpy()
        s = Scene(query[b, 0].double().numpy(), key[b, 0].double().numpy(), valid, p)
        want = sorted(i + s.off for i in oracle.sampled(s))
        assert sorted(rows.positions[b][counts[b]].tolist()) == want
        assert want[-1] == s.end - 1


def test_a_row_with_nan_keeps_all_and_the_others_do_not_change():
    query, key, value, _, p = case("ragged small blocks", audit_rows=2)
    before = select(query, key, value, None, p).keep
    query[0, 1, 12 * 64 + 3, 0] = torch.nan
    after = select(query, key, value, None, p).keep
    assert after[0, 1, 12, :13].all()
    assert not before[0, 1, 12, :13].all()
    after[0, 1, 12] = before[0, 1, 12]
    assert torch.equal(before, after)


@pytest.mark.parametrize("fault", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["value", "key"])
def test_what_is_not_finite_keeps_all_that_sees_it(fault, where):
    query, key = structured(2, 4, 2, 640, D=16, strength=3)
    value, key_valid = values(key), key_mask("left", 2, 640)
    p = params(16, (64, 64), policy="bounded", max_error=0.13, dense_last_blocks=0)
    before = select(query, key, value, key_valid, p)
    assert (before.stats[0, 2:, 0] < before.stats[0, 2:, 1]).all()
    faulty = {"value": value, "key": key}[where]
    faulty[0, 0, 400, 3] = fault
    after = select(query, key, value, key_valid, p)
    # the bound is of all heads, so that it is none for those of the other key head, too
    assert torch.equal(after.stats[0, :, 0], after.stats[0, :, 1])
    assert after.stats[0, :, MULTIPLE].eq(0).all()
    assert not after.stats.isnan().any()
    assert torch.equal(after.keep[1], before.keep[1])
    assert torch.equal(after.stats[1], before.stats[1])


@pytest.mark.parametrize("fault", [float("nan"), float("inf"), float("-inf")])
def test_the_estimate_of_rows_that_see_what_is_not_finite_is_not_known(fault):
    query, key, _, _, p = case("small blocks")
    g = Geometry.of(query, key, None, p)
    mean_query = pool(query, key, g)[0]
    before = estimate(mean_query, key, g, p.scale)
    key[0, 1, 400, 3] = fault
    after = estimate(mean_query, key, g, p.scale)
    unknown = torch.zeros_like(before, dtype=torch.bool)
    unknown[:, 2:, 6:] = g.visible[:, :, 6:]
    assert torch.equal(after.isnan(), unknown)
    assert torch.equal(after[~unknown], before[~unknown])


def test_hidden_tokens_do_not_matter():
    query, key, value, key_valid, p = case("holes")
    before = select(query, key, value, key_valid, p)
    key, value = (torch.where(key_valid[:, None, :, None], x, torch.nan) for x in (key, value))
    after = select(query, key, value, key_valid, p)
    assert torch.equal(before.keep, after.keep)
    assert torch.equal(before.stats, after.stats)


@pytest.mark.parametrize("block", [(64, 64), (128, 64)], ids=str)
@pytest.mark.parametrize("Lkv", [640, 700])
def test_padding_by_whole_blocks_shifts_the_blocks(block, Lkv):
    query, key = structured(2, 4, 2, 640, Lkv, seed=4)
    value = values(key)
    p = params(block=block, policy="bounded", max_error=0.2)
    alone = select(query, key, value, None, p)
    query_pad = 256 if Lkv == 640 else 0
    query, key, value = (
        torch.cat([x.new_full((*x.shape[:2], pad, x.shape[3]), torch.nan), x], 2)
        for x, pad in ((query, query_pad), (key, 256), (value, 256))
    )
    key_valid = (torch.arange(Lkv + 256) >= 256).expand(2, -1)
    padded = select(query, key, value, key_valid, p)
    past = padded.keep[:, :, query_pad // block[0] :, 256 // block[1] :]
    assert torch.equal(past, alone.keep)
    assert padded.keep.sum() == alone.keep.sum()
    torch.testing.assert_close(padded.stats, alone.stats, atol=5e-6, rtol=0)


@pytest.mark.parametrize("mask", ["none", "left"])
@pytest.mark.parametrize(("Lq", "q_offset", "Lkv"), [(384, 0, 640), (300, 129, 700), (1, 63, 128)])
def test_an_offset_in_a_tensor_selects_as_the_filled_part_of_the_cache_does(
    mask, Lq, q_offset, Lkv
):
    query, key = structured(2, 4, 2, Lq, Lkv, seed=4)
    filled = q_offset + Lq
    value = values(key)
    key[:, :, filled:] = 1e4  # what stands in the rest of the cache must not matter
    value[:, :, filled:] = torch.nan
    p = params(block=(64, 64), policy="bounded", max_error=0.13)
    valid = key_mask(mask, 2, filled)
    padded = None if valid is None else torch.nn.functional.pad(valid, (0, Lkv - filled))
    want = select(query, key[:, :, :filled], value[:, :, :filled], valid, p)
    got = select(query, key, value, padded, p, torch.tensor([q_offset], dtype=torch.int32))
    width = want.keep.shape[-1]
    assert torch.equal(got.keep[..., :width], want.keep)
    assert not got.keep[..., width:].any()
    torch.testing.assert_close(got.stats, want.stats, atol=1e-5, rtol=1e-5)


def test_storage_chunks_and_the_batch_do_not_matter(monkeypatch):
    query, key, value, key_valid, p = case("left padding into a chunk")
    first = select(query, key, value, key_valid, p)
    for b in range(2):
        one = select(*(x[b : b + 1] for x in (query, key, value, key_valid)), p)
        assert torch.equal(one.keep[0], first.keep[b])
    for module in (estimate_module, probe_module):
        monkeypatch.setattr(module, "CHUNK_ELEMENTS", 1)
    strided = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value))
    again = select(*strided, key_valid, p)
    assert torch.equal(again.keep, first.keep)
    torch.testing.assert_close(again.stats, first.stats, atol=5e-6, rtol=0)


def test_low_precision_inputs_are_computed_in_fp32():
    query, key, value, _, p = case("ragged small blocks")
    low = [x.to(torch.bfloat16) for x in (query, key, value)]
    exact = [x.float() for x in low]
    g = Geometry.of(query, key, None, p)
    mean_query = pool(*low[:2], g)[0]
    got = estimate(mean_query, low[1], g, p.scale)
    # tensor cores take the mean query in the dtype of the keys
    rounded = mean_query.to(torch.bfloat16).float()
    assert torch.equal(got, estimate(rounded, exact[1], g, p.scale))
    assert not torch.equal(got, estimate(mean_query, exact[1], g, p.scale))
    blocks, distinct = g.audit_blocks(4)
    keep = torch.ones(1, 3, 4, 2, g.Nkv, dtype=torch.bool)
    keep[:, :, :, 1, 1:9] = False
    how = {"scale": p.scale, "blocks": blocks, "distinct": distinct}
    of_low, of_exact = (output_error(*x, keep, g, **how) for x in (low, exact))
    assert torch.equal(of_low.error, of_exact.error)
    assert torch.equal(of_low.norm, of_exact.norm)
    assert of_low.error.dtype == torch.float32
    # nothing dropped is no error but for rounding, and all of the mass
    assert (of_low.error[..., 0] < 1e-9 * of_low.norm).all()
    assert of_low.kept_mass[..., 0].eq(1).all()
    assert (of_low.error[..., 1] > 1e-4 * of_low.norm).all()
