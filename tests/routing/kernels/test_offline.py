"""Every routing kernel compiles to SASS and fits its GPU; the interpreter cannot tell."""

import itertools
import math
import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET"):
    pytest.skip("the interpreter replaces the compiler", allow_module_level=True)

from tests.routing.kernels import offline

# ptxas -v, where the kernels are tuned: more than this is no longer a trade but a mistake
MOST_SPILL_BYTES = {90: 256}
POLICIES = {"hybrid": {}, "crisp": {"router": "jsd"}, "streaming": {}, "dense": {}}
# what runs without -m long: each takes 10 to 20 s where nothing is cached
FIRST = {
    ("hybrid", 128, False, 90),
    ("hybrid", 256, True, 90),
    ("hybrid", 64, True, 80),
    ("crisp", 128, True, 90),
}

CASES = [
    pytest.param(*case, marks=() if case in FIRST else pytest.mark.long)
    for case in itertools.product(POLICIES, (64, 128, 256), (False, True), (90, 80))
]


@pytest.mark.parametrize(("policy", "D", "padded", "arch"), CASES)
def test_kernels_compile(policy, D, padded, arch):
    if offline.ptxas(arch) is None:
        pytest.skip("no ptxas")
    launches = offline.routed(policy, D=D, padded=padded, **POLICIES[policy])
    assert launches
    for launch in offline.distinct(launches, arch):
        built = offline.build(launch, arch)
        assert built.fits, built
        assert built.fp64 == 0, built
        assert built.spill_bytes <= MOST_SPILL_BYTES.get(arch, math.inf), built


@pytest.mark.parametrize("block", [(64, 64), (64, 128), (128, 64)], ids=str)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.long
def test_kernels_compile_with_other_blocks(policy, block):
    if offline.ptxas(90) is None:
        pytest.skip("no ptxas")
    for launch in offline.distinct(offline.routed(policy, L=5000, block=block), 90):
        assert offline.build(launch, 90).fits


@pytest.mark.parametrize("policy", POLICIES)
def test_a_grid_is_within_the_limits_of_cuda(policy):
    for launch in offline.routed(policy, L=1 << 20, dtype=torch.float16):
        assert all(size < 65536 for size in launch.grid[1:]), launch.name
