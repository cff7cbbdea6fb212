"""The torch.compile backend (the passes, then Inductor), and the ways into it."""

from __future__ import annotations

import functools
import os
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import fx

from crisp_flex import fallback, torch_internals, wrappers
from crisp_flex.advice import backend_ignored
from crisp_flex.check_arguments import check_model, config_of, refuse_fields
from crisp_flex.config import CrispConfig, field_names
from crisp_flex.errors import ConfigError
from crisp_flex.graph_run import tracked
from crisp_flex.passes.graph_copy import copy_with_meta
from crisp_flex.passes.pipeline import run_passes
from crisp_flex.report import RewriteReport

Model = TypeVar("Model", bound=Callable[..., Any])

_backends: weakref.WeakKeyDictionary[Any, CrispFlexBackend] = weakref.WeakKeyDictionary()


class CrispFlexBackend:
    """A torch.compile backend with a config and Inductor settings.

    Args:
        config: What to route and when; None takes the defaults.
        mode: A mode of torch.compile ("max-autotune", ...), given to Inductor.
        options: Inductor config entries, as in `torch.compile(options=...)`.

    Raises:
        ConfigError: An option is no setting of Inductor.

    Attributes:
        reports: Maps Dynamo's compile id ("0/1") to what was done to that graph.
    """

    def __init__(
        self,
        config: CrispConfig | None = None,
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = config if config is not None else CrispConfig()
        self.patches = _inductor_patches(mode, options or {})
        self.reports: dict[str, RewriteReport] = {}
        # parts below accelerate's hooks, compiled one by one: module, path, uncompiled forward
        self.parts: list[tuple[Any, str, Callable[..., Any]]] = []

    def __call__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:
        """Rewrite gm in place and compile it with Inductor (Dynamo calls this).

        Args:
            gm: Dynamo graph.
            example_inputs: Its fake inputs.
            mode: As `torch.compile(mode=...)` hands it on; on top of the backend's own.
            options: As `torch.compile(options=...)` hands them on, Inductor's only.
        """
        return self.compile_graph(gm, example_inputs, "", _inductor_patches(mode, options or {}))

    def compile_graph(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        inside: str,
        patches: Mapping[str, Any],
    ) -> Callable[..., Any]:
        """As `__call__`, for the graph of a part of a model.

        Args:
            gm: Dynamo graph.
            example_inputs: Its fake inputs.
            inside: Path of the part in the model, "" for the model itself.
            patches: Inductor settings on top of the backend's own.
        """
        patches = {**self.patches, **patches}
        original = copy_with_meta(gm.graph)
        report = run_passes(gm, self.config, inside=inside)
        # keyed by compile id: Dynamo may restart its analysis and call again for the same frame
        # (a part compiled by itself has a frame of its own, but perhaps the same number)
        self.reports[f"{inside} {torch_internals.current_compile_id()}".strip()] = report
        if not report.sites and len(self.reports) == 1:
            warnings.warn(
                "crisp_flex found no scaled_dot_product_attention call in a graph of this model, "
                "so nothing in that graph is sparse; crisp_flex.explain(model, ...) shows all",
                stacklevel=2,
            )
        if any(site.kernel == "CPU" for site in report.rewritten):
            # Inductor's C++ flex template raises where a pointwise epilogue is fused into it
            patches["epilogue_fusion"] = False
            if self.config.backend != "auto" and len(self.reports) == 1:
                warnings.warn(f"crisp_flex: {backend_ignored(self.config.backend)}", stacklevel=2)
        compiled = fallback.compile_graph(gm, original, example_inputs, patches, report)
        return tracked(compiled, self, report)

    @property
    def __name__(self) -> str:
        return "crisp_flex"


def crisp_flex(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend behind `torch.compile(model, backend="crisp_flex", mode=..., options=...)`.

    Args:
        gm: Dynamo graph, changed in place.
        example_inputs: Fake inputs of gm.
        mode: Given to Inductor.
        options: Fields of CrispConfig, "preset" and "mode", by name; the rest goes to Inductor.

    Raises:
        ConfigError: An option is neither ours nor Inductor's, or a value is out of range.
    """
    ours = {k: v for k, v in (options or {}).items() if k in (*field_names(), "preset")}
    rest = {k: v for k, v in (options or {}).items() if k not in ours}
    mode = rest.pop("mode", mode)
    return CrispFlexBackend(CrispConfig.from_options(ours), mode=mode, options=rest)(
        gm, example_inputs
    )


def compile(
    model: Model,
    config: CrispConfig | str | os.PathLike[str] | None = None,
    **torch_compile_kwargs: Any,  # noqa: ANN401
) -> Model:
    """Make the long prompts of model run sparsely; decode steps and short prompts stay dense.

    A module is compiled in place (`torch.nn.Module.compile`), so the same object comes back, its
    state_dict keys do not change, and `model.generate(...)` takes the compiled forward, also where
    PEFT wraps the model. Hooks that accelerate put around modules (`device_map=`) and that do
    nothing there are taken off, and what stands below the others is compiled: a graph a device, or
    a graph a layer on several. Any other callable comes back as `torch.compile` returns it.

    A module may be compiled again: the last config holds, with reports of its own.

    Args:
        model: A torch.nn.Module in eval mode, or a function of tensors.
        config: What to route and when, or the path of a TOML file that says it
            (`CrispConfig.load`); None takes the defaults (preset "balanced").
        **torch_compile_kwargs: `dynamic`, `fullgraph`, `mode`, `options` (Inductor's) as
            torch.compile takes them.

    Returns:
        The same module, or the compiled function; nothing is compiled before its first call.

    Raises:
        InputError: model is neither, or torch.compile has wrapped it already.
        ConfigError: `backend` or a field of CrispConfig is given by name, `options` has an entry
            that is not Inductor's, or the config file is missing or wrong.

    Example:
        >>> model = crisp_flex.compile(model)
        >>> model.generate(input_ids, max_new_tokens=32)
    """
    if "backend" in torch_compile_kwargs:
        raise ConfigError(
            "crisp_flex.compile sets backend itself: choose the kernel with "
            'CrispConfig(backend="flash"), or another compiler with torch.compile'
        )
    check_model(model, "compile")
    refuse_fields(torch_compile_kwargs)
    backend = CrispFlexBackend(
        config_of(config, "compile"),
        mode=torch_compile_kwargs.pop("mode", None),
        options=torch_compile_kwargs.pop("options", None),
    )
    if isinstance(model, torch.nn.Module):
        _compile_module(model, backend, torch_compile_kwargs)
        for inside in wrappers.models_inside(model):
            _compile_module(inside, backend, torch_compile_kwargs)
        _backends[model] = backend
        return model
    compiled = torch.compile(model, backend=backend, **torch_compile_kwargs)
    _backends[compiled] = backend
    return compiled  # type: ignore[return-value]  # torch.compile keeps the signature


def _compile_module(
    module: torch.nn.Module, backend: CrispFlexBackend, options: Mapping[str, Any]
) -> None:
    """Compile a module in place, or what stands below the hooks that accelerate put on it."""
    blocks: Sequence[Any] = wrappers.open_hooks(module)
    names = {id(part): name for name, part in module.named_modules()}
    done = {id(block) for block, _, _ in backend.parts}
    for block in blocks:
        if id(block) in done:  # inside a PEFT model that was compiled as a whole
            continue
        # what an earlier compilation put there is replaced, not compiled once more
        inner = getattr(block._old_forward, "_crisp_flex_inner", block._old_forward)
        part = functools.partial(_compile_part, backend, names[id(block)])
        # blocks share their code, and Dynamo counts what it compiles of one code object
        compiled = torch_internals.compile_apart(inner, part, **options)
        block._old_forward = functools.wraps(inner)(compiled)
        block._old_forward._crisp_flex_inner = inner
        backend.parts.append((block, names[id(block)], inner))
    if not blocks:
        module.compile(backend=backend, **options)


def _compile_part(
    backend: CrispFlexBackend,
    inside: str,
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    **patches: Any,  # noqa: ANN401
) -> Callable[..., Any]:
    return backend.compile_graph(gm, example_inputs, inside, patches)


def backend_of(model: Callable[..., Any]) -> CrispFlexBackend | None:
    """The backend of what `crisp_flex.compile` returned, None for anything else."""
    try:
        return _backends.get(model)
    except TypeError:  # nothing that a weak reference can point to
        return None


def models_of(owner: object) -> str:
    """The class of the model that a backend compiled, "" where that is not known."""
    return next((type(model).__name__ for model, it in list(_backends.items()) if it is owner), "")


def reports(model: Callable[..., Any]) -> list[RewriteReport]:
    """What was done so far to each graph of a model that `crisp_flex.compile` returned.

    Args:
        model: What `crisp_flex.compile` returned.

    Returns:
        One report a graph, in the order of their compilation; [] before the first call.

    Raises:
        ConfigError: The model did not come from `crisp_flex.compile`.
    """
    backend = backend_of(model)
    if backend is None:
        raise ConfigError(
            f"this {type(model).__name__} did not come from crisp_flex.compile, so it has no "
            "reports: hand over what crisp_flex.compile returned"
        )
    return list(backend.reports.values())


def _inductor_patches(mode: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    patches: dict[str, Any] = {}
    if mode is not None and mode != "default":
        modes = torch_internals.inductor_modes()
        if mode not in modes:
            raise ConfigError(f"mode must be one of {', '.join(sorted(modes))}, got {mode!r}")
        patches.update(modes[mode])
    known = torch_internals.inductor_settings()
    for key, value in options.items():
        name = key.replace("-", "_")
        if name not in known:
            raise ConfigError(
                f"unknown option {key!r}: neither a field of CrispConfig "
                f"({', '.join(field_names())}) nor a setting of Inductor"
            )
        patches[name] = value
    return patches
