"""Marks to hardware, seed, a clean Dynamo for each test, and the qkv factory."""

import pytest
import torch


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs CUDA")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.fixture
def qkv():
    """qkv(B=1, Hq=4, Hkv=2, Lq=512, Lkv=None, D=64, Dv=None, dtype, device): random q, k, v."""

    def make(B=1, Hq=4, Hkv=2, Lq=512, Lkv=None, D=64, Dv=None, dtype=torch.float32, device="cpu"):
        Lkv, Dv = Lkv or Lq, Dv or D
        q = torch.randn(B, Hq, Lq, D, dtype=dtype, device=device)
        k = torch.randn(B, Hkv, Lkv, D, dtype=dtype, device=device)
        v = torch.randn(B, Hkv, Lkv, Dv, dtype=dtype, device=device)
        return q, k, v

    return make
