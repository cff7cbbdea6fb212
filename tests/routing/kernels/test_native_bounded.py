"""The kernels of policy "bounded" on a GPU against the eager reference there."""

import pytest
import torch

from crisp_flex.routing import reference
from crisp_flex.routing.kernels import dispatch
from tests.routing.inputs import SHAPES, long_structured, params
from tests.routing.kernels.compare import kept
from tests.routing.kernels.compare_bounded import (
    accurate,
    bounded_case,
    check_bounded,
    check_estimate,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
def test_the_route_is_the_reference(name, dtype):
    *tensors, settings = bounded_case(name, dtype=dtype, Dv=24, device="cuda", audit_rows=4)
    query, key, _, key_valid = tensors
    check_estimate(query, key, key_valid, settings)
    check_bounded(*tensors, settings)


@pytest.mark.parametrize(
    ("L", "D", "Dv", "Hkv", "G", "block"),
    [
        (4096, 64, 64, 2, 3, (128, 128)),
        (4097, 80, 80, 1, 7, (128, 128)),
        (5000, 96, 64, 1, 8, (128, 128)),
        (5000, 128, 128, 2, 4, (128, 64)),
        (4999, 256, 256, 1, 4, (128, 64)),
        (3000, 256, 128, 1, 1, (128, 128)),
        (16384 + 37, 128, 128, 1, 2, (128, 128)),
    ],
)
def test_head_dims_groups_and_lengths(L, D, Dv, Hkv, G, block):
    query, key = (x.bfloat16() for x in long_structured(L, D, Hkv=Hkv, G=G, device="cuda"))
    gen = torch.Generator("cuda").manual_seed(1)
    value = torch.randn(1, Hkv, L, Dv, device="cuda", generator=gen).bfloat16()
    settings = params(D, block, policy="bounded", max_error=0.2)
    check_estimate(query, key, None, settings)
    check_bounded(query, key, value, None, settings)


def test_a_long_prompt():
    L = 131072 + 37
    query, key = (x.bfloat16() for x in long_structured(L, 64, Hkv=1, G=2, device="cuda"))
    value = torch.randn(1, 1, L, 64, device="cuda").bfloat16()
    check_bounded(query, key, value, None, params(64, policy="bounded", max_error=0.2))


def test_two_runs_give_the_same_bits_and_strides_do_not_matter():
    *tensors, settings = bounded_case("holes", dtype=torch.bfloat16, device="cuda")
    query, key, value, key_valid = tensors
    want = dispatch.route(query, key, key_valid, settings, None, value)
    spread = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value)]
    for q, k, v in ((query, key, value), spread):
        got = dispatch.route(q, k, key_valid, settings, None, v)
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("where", ["query", "key", "value"])
@pytest.mark.parametrize("what", [float("nan"), float("inf")])
def test_what_is_not_finite_keeps_what_sees_it(where, what):
    query, key, value, key_valid, settings = bounded_case(
        "long and ragged", dtype=torch.bfloat16, device="cuda"
    )
    {"query": query, "key": key, "value": value}[where][0, 0, 600, 3] = what
    got = dispatch.route(query, key, key_valid, settings, None, value)
    want = reference.route(query, key, key_valid, settings, None, value)
    assert torch.equal(kept(got, 8), kept(want, 8))
    assert got[3].isfinite().all()


def test_a_tight_bound_leaves_out_less():
    *tensors, settings = bounded_case("long and ragged", dtype=torch.bfloat16, device="cuda")
    tight, loose = (check_bounded(*tensors, accurate(settings, x)) for x in (1e-4, 0.9))
    assert (tight <= loose).all()
    assert (tight < loose).any()
