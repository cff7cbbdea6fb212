"""Names of the routing stages in traces of torch.profiler, and as NVTX ranges under emit_nvtx()."""

from __future__ import annotations

import contextlib

import torch

from crisp_flex import torch_internals

_OFF = contextlib.nullcontext()


def stage(name: str) -> contextlib.AbstractContextManager[object]:
    """A range `crisp_flex::<name>` while a profiler records; else nothing, at no cost."""
    if not torch_internals.profiling():
        return _OFF
    return torch.profiler.record_function(f"crisp_flex::{name}")
