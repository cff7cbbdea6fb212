"""Lengths, head dims, groups and batches in Triton's interpreter, for each policy with kernels.

Collected by test_interpreter.py; see interpreted.py.
"""

import pytest

from tests.routing.inputs import long_structured, params, structured
from tests.routing.kernels.compare import check_route
from tests.routing.kernels.compare_unaudited import check_estimate_mass, check_unaudited
from tests.routing.kernels.interpreted import poisoned  # noqa: F401

# name: (L, B, Hq, Hkv, D)
GRID = {
    "1": (1, 1, 2, 1, 64),
    "100": (100, 1, 1, 1, 96),
    "128": (128, 1, 1, 1, 128),
    "129": (129, 1, 2, 2, 256),
    "1000": (1000, 1, 2, 1, 80),
    "4096": (4096, 1, 1, 1, 64),
    "5000": (5000, 1, 1, 1, 16),
    "groups of 3": (200, 3, 3, 1, 64),
    "groups of 4": (300, 1, 4, 1, 16),
    "groups of 7": (300, 1, 7, 1, 16),
    "groups of 8": (300, 1, 8, 1, 16),
}
POLICIES = {
    "hybrid": {"policy": "hybrid", "coverage": 0.8},
    "lines": {"policy": "crisp", "router": "vs", "max_uncovered": 1.0, "k_min": 3},
    "estimate": {"policy": "crisp", "router": "pe", "max_uncovered": 1.0, "gamma": 0.9},
    "streaming": {"policy": "streaming", "streaming_blocks": 2, "max_uncovered": 1.0},
    "dense": {"policy": "dense"},
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", GRID)
def test_route_equals_the_reference(name, policy):
    L, B, Hq, Hkv, D = GRID[name]
    if L > 2048:
        query, key = long_structured(L, D, Hkv=Hkv, G=Hq // Hkv)
    else:
        query, key = structured(B, Hq, Hkv, L, L, D)
    settings = params(D, dense_last_blocks=0, **POLICIES[policy])
    check = check_route if policy == "hybrid" else check_unaudited
    kept = check(query, key, None, settings)
    if policy == "estimate":
        check_estimate_mass(query, key, None, settings, kept)
    if L > 2048 and policy != "dense":
        assert (kept > 0).float().mean() < 0.5  # a little more than half of them are visible
