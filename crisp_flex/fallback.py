"""A graph that Inductor cannot compile runs as the model wrote it, with one warning that says why.

Without the passes a user who asks torch.compile for the impossible gets its traceback. Here the
model has been promised a result: a dense graph in place of a sparse one, and an uncompiled one
where nothing can be compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from crisp_flex import toolchain, torch_internals
from crisp_flex.report import Reason, Rejection, RewriteReport


def compile_graph(
    gm: fx.GraphModule,
    original: fx.Graph,
    example_inputs: Sequence[Any],
    patches: Mapping[str, Any],
    report: RewriteReport,
) -> Callable[..., Any]:
    """Compile a graph after the passes; where that fails, the graph from before them.

    Args:
        gm: The graph after the passes.
        original: The graph before them, with its meta.
        example_inputs: Fake inputs of both.
        patches: Inductor settings.
        report: Of gm; sites that end up dense get the reason for it.

    Raises:
        InductorError: The original graph does not compile either, and no compiler is missing.
    """
    device_type = _device_type(example_inputs)
    if problem := toolchain.missing(device_type):
        return _uncompiled(gm, problem)  # the passes have refused all sites
    try:
        return torch_internals.compile_with_inductor(gm, example_inputs, patches)
    except torch_internals.COMPILE_ERRORS as error:
        problem = toolchain.diagnose(device_type)
        if not problem and not report.rewritten:
            raise
        said = problem or str(error).partition("\n")[0]
    gm.graph = original
    gm.recompile()
    if problem:
        _reject(report, Rejection(Reason.NO_COMPILER, problem))
        return _uncompiled(gm, problem)
    _reject(report, Rejection(Reason.NOT_COMPILED, said))
    toolchain.warn_once(
        f"Inductor could not compile the sparse attention of a graph ({said}), so that graph is "
        "compiled as the model wrote it, with dense attention. Please report it"
    )
    return torch_internals.compile_with_inductor(gm, example_inputs, patches)


def _uncompiled(gm: fx.GraphModule, problem: str) -> Callable[..., Any]:
    toolchain.warn_once(f"{problem}. Until then the model runs uncompiled, with dense attention")
    return gm.forward


def _device_type(example_inputs: Sequence[Any]) -> str:
    """Of what is compiled: "cuda" where any input is there, since scalars may be on the CPU."""
    types = {x.device.type for x in example_inputs if isinstance(x, torch.Tensor)}
    return next((kind for kind in sorted(types) if kind != "cpu"), "cpu")


def _reject(report: RewriteReport, rejection: Rejection) -> None:
    report.sites[:] = [
        site
        if site.rejection
        else replace(
            site,
            kernel="",
            policy="",
            head_groups=1,
            last_blocks_apart=0,
            selection="",
            rejection=rejection,
        )
        for site in report.sites
    ]
