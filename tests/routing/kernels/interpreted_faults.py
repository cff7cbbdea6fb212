"""NaN, Inf and flat values in Triton's interpreter, for each policy, against the eager reference.

Collected by test_interpreter.py; see interpreted.py.
"""

import pytest
import torch

from tests.routing.kernels.faults import FAULTS, FLAT, POLICIES, check_faults, check_flat
from tests.routing.kernels.interpreted import long, poisoned  # noqa: F401

# where the first test looks there are no more key blocks than one split of the probe has
L, SHORT_L = 576, 512
# of the faults of each policy, those with a code path of their own
FIRST = {
    "hybrid": {"none": False, "NaN query": False, "NaN proxy query": False, "NaN key": True},
    "hybrid min": {"-Inf last query": True},
    "estimate": {"-Inf query": False, "Inf key": True},
    "jsd": {"Inf proxy query": True},
    "streaming": {"NaN last key": True},
}


@pytest.mark.parametrize("policy", FIRST)
def test_lists_equal_the_reference(policy):
    assert check_faults(policy, list(FIRST[policy]), L=SHORT_L) == list(FIRST[policy].values())


@pytest.mark.parametrize("policy", [long(policy) for policy in POLICIES])
def test_all_faults_equal_the_reference(policy):
    check_faults(policy, list(FAULTS), L=L)


@pytest.mark.parametrize(
    ("policy", "fault"),
    [
        ("hybrid", "huge"),
        ("lines", "equal keys"),
        ("streaming", "zero queries"),
        *(long(policy, fault) for policy in POLICIES for fault in FLAT),
    ],
)
def test_flat_heads_keep_what_the_reference_keeps(policy, fault):
    check_flat(policy, [fault], L=SHORT_L)


@pytest.mark.parametrize("policy", [long(policy) for policy in POLICIES])
def test_a_key_of_padding_changes_nothing(policy):
    valid = torch.ones(1, L, dtype=torch.bool)
    valid[0, int(0.3 * L)] = False
    whole = check_faults(policy, ["none", "NaN key", "Inf key"], L=L, key_valid=valid)
    assert whole == [policy == "dense"] * 3
