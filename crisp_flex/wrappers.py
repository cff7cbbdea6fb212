"""Where to compile a model that others have wrapped: below accelerate's hooks, inside PEFT's model.

accelerate (`device_map=`) replaces the forward of every module that holds weights by one that moves
tensors and breaks Dynamo's graph, so that a compiled 12-layer model hands over one attention call.
PEFT's `generate` goes to the model inside, past the wrapper's compiled call.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def models_inside(model: nn.Module) -> list[nn.Module]:
    """Modules whose own calls must be compiled as well: what a PEFT model wraps."""
    get = getattr(model, "get_base_model", None)
    inside = get() if callable(get) else None
    return [inside] if isinstance(inside, nn.Module) and inside is not model else []


def open_hooks(model: nn.Module) -> list[nn.Module]:
    """Take off accelerate's hooks that do nothing; the modules whose `_old_forward` to compile.

    On one device that is the whole model, below its own hook. On several it is each block (a layer
    of a decoder), below the hook that brings its inputs to its device; inside a block all tensors
    stay where they are, so the hooks there are taken off. A model without hooks, or with weights
    that are loaded for each call (offload), gives no modules and is left as it is.
    """
    hooked = [module for module in model.modules() if _hook(module) is not None]
    if not hooked:
        return []
    if not all(_only_moves(_hook(module)) for module in hooked):
        warnings.warn(
            "crisp_flex: hooks of accelerate that load weights for each call (offload) break the "
            "graph, so most attention calls stay dense",
            stacklevel=3,
        )
        return []
    devices = {torch.device(_hook(module).execution_device) for module in hooked}
    if len(devices) == 1 and _hook(model) is not None:
        _remove(module for module in hooked if module is not model)
        return [model]
    blocks = [block for block in _outermost(model) if _stays_on_one_device(block)]
    for block in blocks:
        _remove(x for x in block.modules() if x is not block and _hook(x) is not None)
    return [block for block in blocks if next(block.children(), None) is not None]


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
    """The hooked modules below model that are inside no other one."""
    for child in model.children():
        if _hook(child) is not None:
            yield child
        else:
            yield from _outermost(child)


def _remove(modules: Iterator[nn.Module]) -> None:
    hooks = importlib.import_module("accelerate.hooks")
    for module in list(modules):
        hooks.remove_hook_from_module(module)
