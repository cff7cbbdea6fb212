"""The torch.compile backend (the passes, then Inductor), and the ways into it."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import fx

from crisp_flex import torch_internals, wrappers
from crisp_flex.config import CrispConfig, field_names
from crisp_flex.errors import ConfigError, CrispFlexError
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
        patches = {**self.patches, **_inductor_patches(mode, options or {})}
        report = run_passes(gm, self.config)
        # keyed by compile id: Dynamo may restart its analysis and call again for the same frame
        self.reports[torch_internals.current_compile_id()] = report
        if not report.sites and len(self.reports) == 1:
            warnings.warn(
                "crisp_flex found no scaled_dot_product_attention call in the first graph of this "
                "model, so nothing in it is sparse; crisp_flex.explain(model, ...) shows the rest",
                stacklevel=2,
            )
        if any(site.kernel == "CPU" for site in report.rewritten):
            # Inductor's C++ flex template raises where a pointwise epilogue is fused into it
            patches["epilogue_fusion"] = False
        return torch_internals.compile_with_inductor(gm, example_inputs, patches)

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
    config: CrispConfig | None = None,
    **torch_compile_kwargs: Any,  # noqa: ANN401
) -> Model:
    """Make the long prompts of model run sparsely; decode steps and short prompts stay dense.

    A module is compiled in place (`torch.nn.Module.compile`), so the same object comes back, its
    state_dict keys do not change, and `model.generate(...)` takes the compiled forward, also where
    PEFT wraps the model. Hooks that accelerate put around modules (`device_map=`) and that do
    nothing there are taken off, and what stands below the others is compiled: a graph a device, or
    a graph a layer on several. Any other callable comes back as `torch.compile` returns it.

    Args:
        model: A torch.nn.Module in eval mode, or a function of tensors.
        config: What to route and when; None takes the defaults (preset "balanced").
        **torch_compile_kwargs: `dynamic`, `fullgraph`, `mode`, `options` (Inductor's) as
            torch.compile takes them.

    Raises:
        ConfigError: `backend` is given, or `options` has an entry that is not Inductor's.

    Example:
        >>> model = crisp_flex.compile(model)
        >>> model.generate(input_ids, max_new_tokens=32)
    """
    if "backend" in torch_compile_kwargs:
        raise ConfigError("crisp_flex.compile sets backend itself; use torch.compile to choose one")
    backend = CrispFlexBackend(
        config,
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
    blocks: list[Any] = wrappers.open_hooks(module)
    for block in blocks:
        inner = block._old_forward
        # blocks share their code, and Dynamo counts what it compiles of one code object
        block._old_forward = functools.wraps(inner)(
            torch_internals.compile_apart(inner, backend, **options)
        )
    if not blocks:
        module.compile(backend=backend, **options)


def reports(model: Callable[..., Any]) -> list[RewriteReport]:
    """What was done so far to each graph of a model that `crisp_flex.compile` returned.

    Raises:
        ConfigError: The model did not come from `crisp_flex.compile`.
    """
    backend = _backends.get(model)
    if backend is None:
        raise ConfigError("this model did not come from crisp_flex.compile, so it has no reports")
    return list(backend.reports.values())


def explain(
    model: Callable[..., Any],
    *args: Any,  # noqa: ANN401
    config: CrispConfig | None = None,
    **kwargs: Any,  # noqa: ANN401
) -> Explanation:
    """Trace model(*args, **kwargs) and say, for every attention call, what is done and why.

    The model runs once as it is, hooks included, uncompiled; what Dynamo has compiled of it before
    stays. Whether gradients are on is taken from the caller: under `torch.no_grad()` the answer is
    about inference.

    Args:
        model: A module or function. One that `crisp_flex.compile` returned is explained by its own
            config unless another is given; one compiled by name, by the defaults.
        *args: As for the model.
        config: What to route and when; None takes the model's own, else the defaults.
        **kwargs: As for the model.

    Raises:
        CrispFlexError: Dynamo traced nothing (its recompile limit is reached, or it is disabled).
    """
    found = _backends.get(model)
    settings = config or (found.config if found is not None else CrispConfig())
    seen: dict[str, RewriteReport] = {}

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        copied = fx.GraphModule(gm, _copy_with_meta(gm.graph))
        seen[torch_internals.current_compile_id()] = run_passes(copied, settings)
        return gm.forward

    torch_internals.compile_apart(torch_internals.uncompiled_call(model), backend)(*args, **kwargs)
    if not seen:
        raise CrispFlexError(
            "explain: Dynamo traced no graph of this call; look for its warning about the "
            "recompile limit, or for torch.compiler.disable"
        )
    return Explanation(list(seen.values()))


class Explanation:
    """What crisp_flex does to a model's call: one report a graph; `str()` gives one line a site."""

    def __init__(self, graphs: list[RewriteReport]) -> None:
        self.graphs = graphs

    @property
    def report(self) -> RewriteReport:
        """All sites of all graphs."""
        return RewriteReport([site for graph in self.graphs for site in graph.sites])

    def __str__(self) -> str:
        breaks = f"{len(self.graphs)} graph{'s' if len(self.graphs) != 1 else ''}"
        return f"{breaks}; {self.report}"

    __repr__ = __str__


def _copy_with_meta(graph: fx.Graph) -> fx.Graph:
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph, {}))
    return copied


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
