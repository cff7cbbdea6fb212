"""probe and pool: identities with explicit attention rows, and what padding may not reach."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from crisp_flex.routing import probe as probe_module
from crisp_flex.routing.geometry import Geometry
from crisp_flex.routing.pool import pool, pooled_map
from crisp_flex.routing.probe import probe
from tests.routing.inputs import SHAPES, case, structured
from tests.routing.oracle import SCORE_BUDGET


def test_aligned_masses_are_the_triangle_sums_of_the_tiles():
    query, key, _, p = case("aligned")
    measured = probe(query, key, Geometry.of(query, key, None, p), scale=p.scale, audit_rows=0)
    keys = key.double().repeat_interleave(2, 1)
    logits = query[:, :, -128:].double() @ keys.mT * p.scale
    hidden = torch.arange(640) > torch.arange(512, 640)[:, None]
    tiles = logits.masked_fill(hidden, -torch.inf).softmax(-1).view(1, 4, 128, 5, 128)
    lower = torch.ones(128, 128).tril().bool()
    L = tiles.transpose(2, 3)[..., lower].sum(-1) / 128
    U = tiles.transpose(2, 3)[..., ~lower].sum(-1) / 128
    p_s = (L + torch.nn.functional.pad(U, (1, 0))[..., :-1]).flip(-1)
    tolerance = {"atol": SCORE_BUDGET, "rtol": 0, "check_dtype": False}
    torch.testing.assert_close(measured.p_v, L + U, **tolerance)
    torch.testing.assert_close(measured.p_s, p_s, **tolerance)
    torch.testing.assert_close(measured.c_struct, (L + U)[..., 0] + (L + U)[..., -1], **tolerance)


@pytest.mark.parametrize("name", SHAPES)
def test_masses_sum_to_one_where_there_are_rows(name):
    query, key, key_valid, p = case(name)
    g = Geometry.of(query, key, key_valid, p)
    measured = probe(query, key, g, scale=p.scale, audit_rows=4)
    want = measured.has_rows.float()[:, None].expand_as(measured.c_struct)
    for mass in (measured.p_v, measured.p_s, measured.proxy_mass.flatten(2)):
        torch.testing.assert_close(mass.sum(-1), want, atol=SCORE_BUDGET, rtol=0)
    audit = measured.audit_mass.sum(-1)
    torch.testing.assert_close(audit, want[..., None].expand_as(audit), atol=SCORE_BUDGET, rtol=0)


def test_chunks_of_heads_change_nothing(monkeypatch):
    query, key, key_valid, p = case("ragged small blocks")
    g = Geometry.of(query, key, key_valid, p)
    whole = probe(query, key, g, scale=p.scale, audit_rows=2)
    monkeypatch.setattr(probe_module, "CHUNK_ELEMENTS", 1)
    split = probe(query, key, g, scale=p.scale, audit_rows=2)
    torch.testing.assert_close(split.p_s, whole.p_s, atol=SCORE_BUDGET, rtol=0)
    torch.testing.assert_close(split.audit_mass, whole.audit_mass, atol=SCORE_BUDGET, rtol=0)


def test_no_tensor_of_both_lengths_is_made():
    query, key = structured(1, 1, 1, 2000, D=16)
    _, _, _, p = case("one token")
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    with Watch():
        probe(query, key, Geometry.of(query, key, None, p), scale=p.scale, audit_rows=4)
    # a few rows' worth of zeros pad the sheared proxy rows
    assert 128 * 2000 <= largest <= 128 * 2300


def test_pool_divides_by_the_tokens_that_are_there():
    query, key, key_valid, p = case("holes")
    mean_query, mean_key = pool(query, key, Geometry.of(query, key, key_valid, p))
    for b in range(2):
        valid = key_valid[b]
        tail = key[b, :, 640:][:, valid[640:]].mean(1)
        torch.testing.assert_close(mean_key[b, :, 10], tail, atol=1e-6, rtol=0)
        assert mean_key[b, :, 3].eq(0).all()
    end = key_valid[0].nonzero().max() + 1
    tail = query[0, :, 640:end].mean(1)
    torch.testing.assert_close(mean_query[0, :, 5], tail, atol=1e-6, rtol=0)


def test_pooled_rows_sum_to_one_or_see_nothing():
    query, key, key_valid, p = case("no valid key in one sequence")
    g = Geometry.of(query, key, key_valid, p)
    rows = pooled_map(*pool(query, key, g), g.visible, p.scale).sum(-1)
    assert rows[0].eq(0).all()
    torch.testing.assert_close(rows[1], torch.ones_like(rows[1]))
