"""On CUDA a call whose selection has no kernel stays dense, unless the user chose otherwise."""

import pytest
import torch
from graphs import capture, causal
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

from crisp_flex import CrispConfig, Reason, flex_hop, toolchain
from crisp_flex.passes.pipeline import run_passes
from crisp_flex.routing.kernels import route

L = 8192
CUDA = torch.device("cuda", 0)


@pytest.fixture
def site(monkeypatch):
    """site(config, dtype, D, shared_bytes): the report of a causal call, as if on such a GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(flex_hop, "flash_available", lambda: False)
    monkeypatch.setattr(toolchain, "missing", lambda device_type: "")
    monkeypatch.setattr(toolchain, "warn_once", lambda text: None)

    def make(config=None, *, dtype=torch.bfloat16, D=64, shared_bytes=232_448):
        monkeypatch.setattr(route, "_shared_bytes", lambda device: shared_bytes)
        # nothing runs: memory that was never written will do
        q, k, v = (torch.empty(1, H, L, D, dtype=dtype, device="meta") for H in (2, 1, 1))
        gm = capture(causal, q, k, v)
        for node in gm.graph.nodes:
            if "example_value" in node.meta:
                given = node.meta["example_value"]
                node.meta["example_value"] = tree_map_only(FakeTensor, on_cuda, given)
        (found,) = run_passes(gm, config or CrispConfig()).sites
        return found

    return make


def on_cuda(x):
    return FakeTensor(
        x.fake_mode, torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"), CUDA
    )


WITHOUT_KERNELS = {
    "fp32": ({}, {"dtype": torch.float32}),
    "blocks of 32": ({"block_size": (128, 32)}, {}),
    "a wide head on a small card": ({}, {"D": 256, "shared_bytes": 101_376}),
}


@pytest.mark.parametrize(("settings", "call"), WITHOUT_KERNELS.values(), ids=WITHOUT_KERNELS)
def test_a_call_without_kernels_stays_dense(site, settings, call):
    found = site(CrispConfig(**settings), **call)
    assert found.rejection.reason is Reason.NO_SELECTION_KERNEL


@pytest.mark.parametrize(("settings", "call"), WITHOUT_KERNELS.values(), ids=WITHOUT_KERNELS)
def test_min_seqlen_is_the_users_word_and_the_report_says_how(site, settings, call):
    found = site(CrispConfig(min_seqlen=L, **settings), **call)
    assert found.selection == "reference"
    assert "blocks chosen by plain PyTorch (slow)" in str(found)


def test_with_kernels_nothing_is_refused(site):
    for config in (CrispConfig(), CrispConfig(block_size=(128, 64)), CrispConfig(policy="crisp")):
        found = site(config)
        assert found.selection == "kernels", found
        assert "plain PyTorch" not in str(found)


def test_settings_that_have_no_kernels_at_all_were_asked_for(site):
    for settings in ({"policy": "minference"}, {"policy": "hybrid", "coverage_min": 0.5}):
        assert site(CrispConfig(**settings)).selection == "reference"
