"""What the cases share: graphs that run as the passes left them."""

import pytest
import torch

from crisp_flex import torch_internals


@pytest.fixture
def without_inductor(monkeypatch):
    """crisp_flex runs each graph without compiling it; no gradients."""

    def as_it_is(gm, example_inputs, patches):
        return gm.forward

    monkeypatch.setattr(torch_internals, "compile_with_inductor", as_it_is)
    with torch.no_grad():
        yield
