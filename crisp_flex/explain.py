"""explain: trace a call of a model, rewrite nothing of it, and say what would be rewritten."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from crisp_flex import torch_internals
from crisp_flex.backend import CrispFlexBackend, backend_of
from crisp_flex.check_arguments import check_model, config_of
from crisp_flex.config import CrispConfig
from crisp_flex.errors import CrispFlexError
from crisp_flex.explanation import Explanation
from crisp_flex.passes.graph_copy import copy_with_meta
from crisp_flex.passes.pipeline import run_passes
from crisp_flex.report import RewriteReport
from crisp_flex.wrappers import HookedModel, below_hooks

# A module, its path, and its forward below its hook.
Part = tuple[Any, str, Callable[..., Any]]


def explain(
    model: Callable[..., Any],
    *args: Any,  # noqa: ANN401
    config: CrispConfig | str | os.PathLike[str] | None = None,
    **kwargs: Any,  # noqa: ANN401
) -> Explanation:
    """Trace model(*args, **kwargs) and say, for every attention call, what is done and why.

    The model runs once as it is, hooks included, uncompiled; its compiled graphs and Dynamo's
    caches of it stay as they are (on torch 2.11 and 2.12 graphs behind a graph break are added to
    them). A cache handed in is filled by the run. Whether gradients are on is taken from the
    caller: under `torch.no_grad()` the answer is about inference.

    Args:
        model: A module or function. One that `crisp_flex.compile` returned is explained by its own
            config unless another is given; one compiled by name, by the defaults.
        *args: As for the model.
        config: What to route and when, or the path of a TOML file that says it; None takes the
            model's own, else the defaults.
        **kwargs: As for the model.

    Returns:
        The sites in the order of their graphs; `str()` is text for people, `to_dict()` plain data.

    Raises:
        InputError: model is neither a module nor a function.
        ConfigError: The config is wrong.
        CrispFlexError: Dynamo traced nothing (its recompile limit is reached, or it is disabled).

    Example:
        >>> import torch, crisp_flex
        >>> attend = torch.nn.functional.scaled_dot_product_attention
        >>> q = torch.zeros(1, 2, 256, 16)
        >>> with torch.no_grad():
        ...     found = crisp_flex.explain(attend, q, q, q, is_causal=True)
        >>> [site.rejection.reason.name for site in found.report.rejected]
        ['TOO_SHORT']
    """
    check_model(model, "explain", compiled=True)
    owner = backend_of(model)
    given = config_of(config, "explain")
    settings = given or (owner.config if owner is not None else CrispConfig())
    seen: dict[str, RewriteReport] = {}

    def backend(
        inside: str, gm: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        copied = fx.GraphModule(gm, copy_with_meta(gm.graph))
        report = run_passes(copied, settings, inside=inside)
        # by compile id: Dynamo may restart its analysis and call again for the same frame
        seen[f"{inside} {torch_internals.current_compile_id()}"] = report
        return gm.forward

    call = torch_internals.uncompiled_call(model)
    hooked, parts = _parts(model, owner)
    with torch_internals.counted_graph_breaks() as breaks:
        if parts:
            with hooked.opened(), _traced_parts(parts, backend):
                call(*args, **kwargs)
        else:
            whole = functools.partial(backend, "")
            torch_internals.compile_apart(call, whole)(*args, **kwargs)
    if not seen:
        raise CrispFlexError(
            "explain: Dynamo traced no graph of this call; look for its warning about the "
            "recompile limit, or for torch.compiler.disable"
        )
    return Explanation(
        graphs=[_by_own_names(report, model) for report in seen.values()],
        model=type(model).__name__ if isinstance(model, torch.nn.Module) else _name(model),
        config=settings,
        breaks=breaks,
        parts=len(parts) if len(parts) > 1 else 0,
    )


def _parts(
    model: Callable[..., Any], owner: CrispFlexBackend | None
) -> tuple[HookedModel, list[Part]]:
    """What is compiled one by one below accelerate's hooks, or would be by `crisp_flex.compile`."""
    if owner is not None or not isinstance(model, torch.nn.Module):
        return HookedModel(), [] if owner is None else owner.parts
    if torch_internals.is_compiled(model):  # by name, hooks and all
        return HookedModel(), []
    hooked = below_hooks(model)
    names = {id(part): name for name, part in model.named_modules()}
    modules: tuple[Any, ...] = hooked.parts
    return hooked, [(part, names[id(part)], part._old_forward) for part in modules]


@contextlib.contextmanager
def _traced_parts(
    parts: Sequence[Part],
    backend: Callable[[str, fx.GraphModule, Sequence[Any]], Callable[..., Any]],
) -> Iterator[None]:
    """While active, the parts' forwards are traced, each by itself."""
    compiled = [part._old_forward for part, _, _ in parts]
    try:
        for part, path, inner in parts:
            traced = torch_internals.compile_apart(inner, functools.partial(backend, path))
            # accelerate reads the signature of what it calls
            part._old_forward = functools.wraps(inner)(traced)
        yield
    finally:
        for (part, _, _), forward in zip(parts, compiled, strict=True):
            part._old_forward = forward


def _by_own_names(report: RewriteReport, model: Callable[..., Any]) -> RewriteReport:
    """The report with each path as the model's `named_modules()` has it, where one ends so."""
    if not isinstance(model, torch.nn.Module):
        return report
    from dataclasses import replace

    names = [name for name, _ in model.named_modules()]

    def own(path: str) -> str:
        ends = [name for name in names if path and name.endswith(f".{path}")]
        return ends[0] if path not in names and len(ends) == 1 else path

    return RewriteReport(
        [replace(site, module_path=own(site.module_path)) for site in report.sites]
    )


def _name(model: Callable[..., Any]) -> str:
    return getattr(model, "__name__", type(model).__name__)
