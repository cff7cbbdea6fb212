"""The kernels in Triton's interpreter, on CPU tensors, against the eager reference, stage by stage.

Collected by test_interpreter.py, in a process that set TRITON_INTERPRET before triton was imported.
Only fp32 and fp16: bf16 tl.dot is wrong in the interpreter (triton 3.6).
"""

import pytest
import torch

from crisp_flex.routing import reference
from crisp_flex.routing.geometry import Geometry
from crisp_flex.routing.kernels import audit, levels, pool
from crisp_flex.routing.kernels.layout import Layout
from crisp_flex.routing.kernels.route import route
from crisp_flex.routing.policies import hybrid
from tests.routing.inputs import SHAPES, case, key_mask, params, structured
from tests.routing.kernels.compare import MASS_BUDGET, check_masses, check_route


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """What the launchers allocate is NaN, or a block far out of range."""
    fill = {torch.float32: float("nan"), torch.int32: 1 << 30, torch.int8: 127}
    empty, new_empty = torch.empty, torch.Tensor.new_empty

    def poison(x):
        return x.fill_(fill[x.dtype]) if x.dtype in fill else x

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: poison(new_empty(*a, **k)))


# beside those of the eager tests: a head dim that is no power of two, mixed blocks in a chunk, and
# few programs, each of which takes the interpreter as long as a whole eager call
MORE_SHAPES = {
    "D 80": (300, 300, 1, 2, 1, 80, (128, 128), "none"),
    "mixed blocks in a chunk": (200, 445, 1, 2, 2, 32, (64, 128), "none"),
    "mixed blocks, holes": (440, 500, 2, 2, 1, 32, (128, 64), "holes"),
    "few holes": (260, 330, 1, 2, 1, 32, (128, 64), "holes"),
    "short padding": (130, 150, 2, 2, 1, 32, (64, 64), "left"),
    "padding, one head": (130, 150, 1, 1, 1, 32, (64, 64), "left"),
    "few small blocks": (450, 450, 1, 2, 2, 32, (64, 64), "none"),
    "four heads": (450, 450, 1, 4, 2, 16, (64, 64), "none"),
}


def long(*values):
    return pytest.param(*values, marks=pytest.mark.long)


ROUTED = [
    "D 80",
    "mixed blocks in a chunk",
    "short padding",
    "one token",
    "one block",
    "half query blocks",
    "chunk one short of a block",
    "no valid key in one sequence",
    long("mixed blocks, holes"),
    long("one short block"),
    long("one more than a block"),
    long("ragged"),
    long("aligned"),
    long("long and ragged"),
    long("left padding into a chunk"),
    long("right padding"),
]


def inputs(name, **changes):
    if name in SHAPES:
        return case(name, policy="hybrid", **changes)
    Lq, Lkv, B, Hq, Hkv, D, block, mask = MORE_SHAPES[name]
    query, key = structured(B, Hq, Hkv, Lq, Lkv, D)
    return query, key, key_mask(mask, B, Lkv), params(D, block, policy="hybrid", **changes)


@pytest.mark.parametrize("name", ROUTED)
def test_route_equals_the_reference(name):
    check_route(*inputs(name, dense_last_blocks=0))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("few holes", {"coverage": 0.6, "audit_rows": 3, "dense_last_blocks": 2}),
        ("few small blocks", {"coverage": 0.97, "audit_rows": 1, "coverage_reduce": "min"}),
        ("mixed blocks in a chunk", {"coverage": 1.0}),
        long("ragged small blocks", {"coverage": 0.8, "coverage_reduce": "min"}),
        long("holes", {"coverage": 0.6, "audit_rows": 3, "dense_last_blocks": 2}),
        long("aligned", {"coverage": 0.97, "audit_rows": 1}),
        long("mixed blocks, holes", {"coverage": 0.7, "audit_rows": 1}),
        long("ragged chunk", {"coverage": 1.0}),
    ],
    ids=str,
)
def test_settings_equal_the_reference(name, changes):
    check_route(*inputs(name, **changes))


@pytest.mark.parametrize(
    "name",
    [
        "mixed blocks in a chunk",
        "few holes",
        "D 80",
        long("small blocks"),
        long("ragged chunk"),
        long("mixed blocks, holes"),
    ],
)
def test_masses_equal_the_reference(name):
    check_masses(*inputs(name))


@pytest.mark.parametrize("name", ["ragged chunk", "mixed blocks, holes"])
def test_means_equal_the_reference(name):
    query, key, key_valid, p = inputs(name)
    want = reference.pool(query, key, Geometry.of(query, key, key_valid, p))
    got = pool.pool(query, key, Layout.of(query, key, key_valid, p))
    for x, y in zip(got, want, strict=True):
        assert (x - y).abs().max() < MASS_BUDGET


def test_kept_lists_differ_between_heads_and_drop_blocks():
    kept = check_route(*inputs("ragged small blocks", coverage=0.7))
    assert not torch.equal(kept[:, 0], kept[:, 1])
    assert (kept > 0).float().mean() < 0.45  # 0.53 of them are visible


def test_half_precision_and_transposed_storage():
    query, key = structured(1, 2, 1, 300, 300, 64, dtype=torch.float16)
    query, key = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key))
    check_route(query, key, None, params(64, policy="hybrid"))


def test_what_stands_in_padding_is_not_read():
    query, key, key_valid, p = inputs("padding, one head")
    want = route(query, key, key_valid, p)
    offset = key.shape[2] - query.shape[2]
    key = key.masked_fill(~key_valid[:, None, :, None], float("nan"))
    query = query.masked_fill(~key_valid[:, None, offset:, None], float("nan"))
    for x, y in zip(route(query, key, key_valid, p), want, strict=True):
        assert torch.equal(x, y)


def test_constants_are_those_of_the_policy():
    assert levels.MULTIPLES == hybrid.MULTIPLES
    assert levels.LINE_FACTOR == hybrid._LINE_FACTOR
    assert audit.COVERAGE_MARGIN == hybrid._COVERAGE_MARGIN
