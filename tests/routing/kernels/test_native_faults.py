"""NaN, Inf and flat values on the GPU, for each policy with kernels, against the reference."""

import pytest
import torch

pytest.importorskip("triton")
from tests.routing.kernels.faults import FAULTS, FLAT, POLICIES, check_faults, check_flat

pytestmark = pytest.mark.gpu

# Ragged, so that the proxy rows are not the last audited block; and aligned.
SHAPES = {
    "ragged": {"L": 2000, "D": 64, "block": (128, 128)},
    "small blocks": {"L": 2048, "D": 128, "block": (64, 64)},
}
policies = pytest.mark.parametrize("policy", POLICIES)


@policies
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_lists_equal_the_reference(shape, dtype, policy):
    faults = list(FAULTS)
    if shape == "ragged":
        # the reference looks at rows past the end, too, for which 0 times this Inf is NaN
        faults.remove("Inf key of no mass")
    whole = check_faults(policy, faults, dtype=dtype, device="cuda", **SHAPES[shape])
    for name in ("NaN last query", "NaN key", "Inf key", "-Inf key", "NaN last key"):
        assert whole[faults.index(name)], name
    assert whole[faults.index("none")] == (policy == "dense")


@policies
@pytest.mark.parametrize("shape", SHAPES)
def test_flat_heads_keep_what_the_reference_keeps(shape, policy):
    check_flat(policy, list(FLAT), device="cuda", **SHAPES[shape])


@policies
def test_a_key_of_padding_changes_nothing(policy):
    shape = SHAPES["small blocks"]
    valid = torch.ones(1, shape["L"], dtype=torch.bool, device="cuda")
    valid[0, int(0.3 * shape["L"])] = False
    faults = ["none", "NaN key", "Inf key", "-Inf key"]
    whole = check_faults(
        policy, faults, dtype=torch.bfloat16, device="cuda", key_valid=valid, **shape
    )
    assert whole == [policy == "dense"] * 4
