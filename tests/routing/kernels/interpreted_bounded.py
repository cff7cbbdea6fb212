"""The kernels of policy "bounded" in Triton's interpreter against the eager reference.

Collected by test_interpreter.py, in a process that set TRITON_INTERPRET before triton was imported.
"""

import pytest
import torch

from crisp_flex.routing import reference
from crisp_flex.routing.kernels import dispatch
from tests.routing.kernels.compare import kept
from tests.routing.kernels.compare_bounded import (
    accurate,
    bounded_case,
    check_bounded,
    check_estimate,
)
from tests.routing.kernels.interpreted import long, poisoned  # noqa: F401 (a fixture)


@pytest.mark.parametrize(
    "name",
    [
        "one token",
        "ragged",
        "half query blocks",
        long("holes"),
        long("no valid key in one sequence"),
        *(
            long(x)
            for x in (
                "one more than a block", "small blocks", "half key blocks", "aligned chunk",
                "left padding into a chunk", "right padding", "long and ragged",
            )
        ),
    ],
)  # fmt: skip
def test_the_route_is_the_reference(name):
    query, key, value, key_valid, settings = bounded_case(name, Dv=24)
    check_bounded(query, key, value, key_valid, settings)


def test_estimates_and_half_precision():
    query, key, value, key_valid, settings = bounded_case("ragged", dtype=torch.float16)
    check_estimate(query, key, key_valid, settings)
    check_bounded(query, key, value, key_valid, settings)


@pytest.mark.long
def test_a_tight_bound_leaves_out_less_than_a_loose_one():
    query, key, value, key_valid, settings = bounded_case("aligned")
    tight = check_bounded(query, key, value, key_valid, accurate(settings, 1e-6))
    loose = check_bounded(query, key, value, key_valid, accurate(settings, 0.99))
    assert (tight <= loose).all()
    assert (tight < loose).any()


def test_the_offset_may_stand_in_a_tensor():
    query, key, value, key_valid, settings = bounded_case("ragged chunk")
    offset = torch.tensor([400])
    check_bounded(query, key, value, key_valid, settings, offset)


@pytest.mark.parametrize("where", ["query", long("key"), long("value")])
def test_what_is_not_finite_keeps_what_sees_it(where):
    query, key, value, key_valid, settings = bounded_case("ragged")
    {"query": query, "key": key, "value": value}[where][0, 0, 200, 3] = float("nan")
    got = dispatch.route(query, key, key_valid, settings, None, value)
    want = reference.route(query, key, key_valid, settings, None, value)
    assert torch.equal(kept(got, 3), kept(want, 3))
    assert got[3].isfinite().all()
