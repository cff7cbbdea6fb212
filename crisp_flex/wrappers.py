"""Where to compile a model that others have wrapped: below accelerate's hooks, inside PEFT's model.

accelerate (`device_map=`) replaces the forward of every module that holds weights by one that moves
tensors and breaks Dynamo's graph, so that a compiled 12-layer model hands over one attention call.
PEFT's `generate` goes to the model inside, past the wrapper's compiled call.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


def models_inside(model: nn.Module) -> list[nn.Module]:
    """Modules whose own calls must be compiled as well: what a PEFT model wraps."""
    get = getattr(model, "get_base_model", None)
    inside = get() if callable(get) else None
    return [inside] if isinstance(inside, nn.Module) and inside is not model else []


@dataclass(frozen=True, slots=True)
class HookedModel:
    """Where a model under accelerate's hooks is to be compiled.

    Args:
        parts: Modules whose `_old_forward`, below their hook, is compiled; none for a model without
            hooks, and for one whose weights are loaded for each call (offload).
        idle: Modules inside them whose hook does nothing, since all tensors are there already.
    """

    parts: tuple[nn.Module, ...] = ()
    idle: tuple[nn.Module, ...] = ()

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """While active, the idle hooks are off, as `open_hooks` takes them off for good."""
        modules: list[Any] = list(self.idle)
        under_hook = [module.forward for module in modules]
        try:
            for module in modules:
                module.forward = module._old_forward
            yield
        finally:
            for module, forward in zip(modules, under_hook, strict=True):
                module.forward = forward


def below_hooks(model: nn.Module) -> HookedModel:
    """The parts of a model to compile one by one, and the hooks in their way; reads only.

    On one device that is the whole model, below its own hook. On several it is each block (a layer
    of a decoder), below the hook that brings its inputs to its device; inside a block all tensors
    stay where they are.
    """
    hooked = [module for module in model.modules() if _hook(module) is not None]
    if not hooked:
        return HookedModel()
    if not all(_only_moves(_hook(module)) for module in hooked):
        warnings.warn(
            "crisp_flex: hooks of accelerate that load weights for each call (offload) break the "
            "graph, so most attention calls stay dense",
            stacklevel=4,
        )
        return HookedModel()
    devices = {torch.device(_hook(module).execution_device) for module in hooked}
    if len(devices) == 1 and _hook(model) is not None:
        return HookedModel((model,), tuple(module for module in hooked if module is not model))
    blocks = list(_outermost(model))
    inside = (x for block in blocks for x in block.modules() if x is not block)
    return HookedModel(
        tuple(block for block in blocks if next(block.children(), None) is not None),
        tuple(x for x in inside if _hook(x) is not None),
    )


def open_hooks(model: nn.Module) -> tuple[nn.Module, ...]:
    """Take off accelerate's hooks that do nothing; the parts whose `_old_forward` to compile."""
    found = below_hooks(model)
    if found.idle:
        hooks = importlib.import_module("accelerate.hooks")
        for module in found.idle:
            hooks.remove_hook_from_module(module)
    return found.parts


def _hook(module: nn.Module) -> Any:  # noqa: ANN401
    return module.__dict__.get("_hf_hook")


def _only_moves(hook: Any) -> bool:  # noqa: ANN401
    """Whether a hook brings the inputs of its module to one device, and does nothing else."""
    alone = type(hook).__name__ == "AlignDevicesHook"
    return alone and not hook.offload and hook.execution_device is not None


def _stays_on_one_device(block: nn.Module) -> bool:
    """Whether no hook inside a hooked block moves anything elsewhere."""
    inner = (_hook(x) for x in block.modules())
    return len({torch.device(x.execution_device) for x in inner if x is not None}) == 1


def _outermost(model: nn.Module) -> Iterator[nn.Module]:
    """The hooked modules below model that stay on one device and are inside no other such one."""
    for child in model.children():
        if _hook(child) is not None and _stays_on_one_device(child):
            yield child
        else:
            yield from _outermost(child)
