"""A position of query 0 that only the device knows, in Triton's interpreter, for each policy.

Collected by test_interpreter.py; see interpreted.py.
"""

import pytest
import torch

from tests.routing.inputs import key_mask, params, structured
from tests.routing.kernels.compare import check_route
from tests.routing.kernels.compare_unaudited import check_unaudited
from tests.routing.kernels.interpreted import long, poisoned  # noqa: F401

# name: (Lq, filled, Lkv, B, Hq, Hkv, D, block, key mask); query 0 stands at filled - Lq
CACHES = {
    "half filled": (150, 210, 450, 1, 2, 1, 32, (64, 64), "none"),
    "empty before": (140, 140, 300, 1, 2, 2, 32, (128, 64), "none"),
    "in wide key blocks": (130, 333, 500, 1, 2, 1, 32, (64, 128), "none"),
    "holes": (100, 201, 300, 1, 2, 1, 32, (64, 64), "holes"),
    "aligned": (128, 384, 640, 1, 2, 2, 32, (128, 128), "none"),
    "whole": (300, 450, 450, 1, 2, 1, 32, (64, 64), "none"),
    "left padding": (200, 260, 400, 2, 2, 1, 32, (64, 64), "left"),
    "many blocks": (400, 931, 1200, 1, 3, 3, 32, (64, 64), "none"),
    "one query": (1, 77, 300, 1, 2, 1, 32, (128, 128), "none"),
}
POLICIES = {
    "hybrid": {"policy": "hybrid", "coverage": 0.8},
    "lines": {"policy": "crisp", "router": "vs", "max_uncovered": 1.0, "k_min": 2},
    "estimate": {"policy": "crisp", "router": "pe", "max_uncovered": 1.0, "gamma": 0.8},
    "jsd": {"policy": "crisp", "router": "jsd"},
    "streaming": {"policy": "streaming", "streaming_blocks": 2, "max_uncovered": 1.0},
    "dense": {"policy": "dense"},
}
FIRST = {
    ("half filled", "hybrid"),
    ("in wide key blocks", "hybrid"),
    ("holes", "hybrid"),
    ("in wide key blocks", "lines"),
    ("in wide key blocks", "estimate"),
    ("holes", "jsd"),
    ("in wide key blocks", "streaming"),
    ("half filled", "dense"),
}
GRID = [(name, policy) for name in CACHES for policy in POLICIES]


def cache(name, **changes):
    """Arguments of a call over a cache whose unfilled part holds NaN, as allocated memory may."""
    Lq, filled, Lkv, B, Hq, Hkv, D, block, mask = CACHES[name]
    query, key = structured(B, Hq, Hkv, Lq, filled, D)
    rest = torch.full((B, Hkv, Lkv - filled, D), float("nan"))
    settings = params(D, block, **changes)
    offset = torch.tensor([filled - Lq])
    return query, torch.cat([key, rest], 2), key_mask(mask, B, Lkv), settings, offset


@pytest.mark.parametrize(
    ("name", "policy"), [case if case in FIRST else long(*case) for case in GRID]
)
def test_route_equals_the_reference(name, policy):
    query, key, key_valid, settings, offset = cache(name, dense_last_blocks=0, **POLICIES[policy])
    check = check_route if policy == "hybrid" else check_unaudited
    check(query, key, key_valid, settings, offset)
