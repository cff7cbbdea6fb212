"""What the public functions take besides tensors: a wrong model or config gets one sentence."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch

from crisp_flex.config import PRESETS, CrispConfig, field_names
from crisp_flex.errors import ConfigError, InputError


def check_model(model: object, caller: str, *, compiled: bool = False) -> None:
    """Raise InputError unless model is something that can be compiled.

    Args:
        model: A module, or a function of tensors.
        caller: The public function that was called, such as "compile".
        compiled: Whether it may have gone through torch.compile.
    """
    takes = f"crisp_flex.{caller} takes a torch.nn.Module or a function of tensors"
    inner = getattr(model, "model", None)
    if isinstance(model, type):
        raise InputError(f"{takes}, got the class {model.__name__}: make an instance of it first")
    if isinstance(model, torch.nn.Module):
        if hasattr(model, "_orig_mod") and not compiled:
            raise InputError(
                f"{takes}, got one that torch.compile has wrapped: give the module inside it, "
                "model._orig_mod, or the model as it was before torch.compile"
            )
        return
    kind = type(model).__name__
    if isinstance(model, (str, os.PathLike)):
        raise InputError(
            f"{takes}, got {os.fspath(model)!r}: load the model first, as with transformers' "
            "AutoModelForCausalLM.from_pretrained"
        )
    if hasattr(model, "convert_tokens_to_ids"):
        raise InputError(f"{takes}, got the tokenizer {kind}: give the model")
    if isinstance(inner, torch.nn.Module):
        raise InputError(f"{takes}, got {kind}: give the module inside it, its .model")
    if not callable(model):
        raise InputError(f"{takes}, got {kind}")


def config_of(config: Any, caller: str) -> CrispConfig | None:  # noqa: ANN401
    """The config that a user handed over.

    Args:
        config: A CrispConfig, the path of a TOML file, or None.
        caller: The public function that was called, such as "compile".

    Raises:
        ConfigError: It is none of these, or the file is missing or wrong.
    """
    if config is None or isinstance(config, CrispConfig):
        return config
    if isinstance(config, str) and config in PRESETS and not os.path.exists(config):
        raise ConfigError(
            f"{config!r} is a preset, and config a CrispConfig or the path of a TOML file: write "
            f"crisp_flex.CrispConfig.preset({config!r})"
        )
    if isinstance(config, (str, os.PathLike)):
        return CrispConfig.load(config)
    raise ConfigError(
        f"crisp_flex.{caller}: config must be a CrispConfig or the path of a TOML file, got "
        f'{type(config).__name__}: write CrispConfig(policy="hybrid"), or '
        "CrispConfig.from_options({...}) for a dict"
    )


def refuse_fields(names: Iterable[str]) -> None:
    """Raise ConfigError where a field of CrispConfig was given to `compile` as its own argument.

    Args:
        names: Keyword arguments that are meant for torch.compile.
    """
    for name in names:
        if name == "preset":
            raise ConfigError(
                "crisp_flex.compile has no argument preset: write "
                "compile(model, CrispConfig.preset(...))"
            )
        if name in field_names():
            raise ConfigError(
                f"crisp_flex.compile has no argument {name}: write "
                f"compile(model, CrispConfig({name}=...))"
            )
