"""What must be on this machine for anything to be compiled; what is broken, what to install.

Each answer is a sentence for people, "" where all is well, and is looked up once a process.
"""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sysconfig
import warnings

import torch

from crisp_flex import torch_internals
from crisp_flex.errors import FallbackWarning

_PYTHON_EXTENSION = "#include <Python.h>\n#include <cmath>\n"
_SECONDS = 60


@functools.cache
def missing(device_type: str) -> str:
    """What keeps Inductor from compiling for a device, by its own search; "" if nothing is known.

    Args:
        device_type: "cpu" or "cuda"; of others nothing is known.
    """
    if device_type == "cuda":
        return _triton_problem()
    if device_type == "cpu" and torch_internals.cpp_compiler() is None:
        named = os.environ.get("CXX")
        which = f"CXX={named} does not run" if named else "g++ does not run"
        return f"Inductor finds no C++ compiler ({which}): install g++, or set CXX to a compiler"
    return ""


def diagnose(device_type: str) -> str:
    """As `missing`, after a failed compilation: the C++ compiler is given a file to read, too."""
    known = missing(device_type)
    return known or (_cpp_problem() if device_type == "cpu" else "")


@functools.cache
def flash_problem() -> str:
    """Why FLASH cannot be used; "" where flash-attn-4 imports with all that Inductor asks of it."""
    try:
        for module, name in torch_internals.FLASH_NEEDS:
            getattr(importlib.import_module(module), name)
    except Exception as error:  # what importing somebody's package raises has no bounds
        missing_module = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing_module in ("flash_attn", "flash_attn.cute"):
            return "flash-attn-4 is not installed: pip install flash-attn-4"
        return (
            f"flash-attn-4 is installed but does not import ({_first_line(error)}): "
            "pip install --force-reinstall flash-attn-4"
        )
    return ""


@functools.cache
def warn_once(text: str) -> None:
    """A FallbackWarning, once a process for each text."""
    warnings.warn(f"crisp_flex: {text}", FallbackWarning, stacklevel=2)


@functools.cache
def _triton_problem() -> str:
    try:
        import triton
    except Exception as error:  # as above; what is no ImportError stops torch._dynamo before us
        if isinstance(error, ModuleNotFoundError) and error.name == "triton":
            return "Triton is not installed: pip install triton"
        return (
            f"Triton is installed but does not import ({_first_line(error)}): "
            "pip install --force-reinstall triton"
        )
    if not torch.cuda.is_available():  # a graph for a GPU that is elsewhere
        return ""
    try:
        # builds a module in C the first time, and loads it
        triton.runtime.driver.active.get_current_target()
    except Exception as error:  # of the compiler, the loader or the driver
        return (
            f"Triton cannot reach the GPU ({_first_line(error)}): it needs a C compiler (install "
            "gcc, or set CC) and a Triton cache folder from which programs may run"
        )
    return ""


@functools.cache
def _cpp_problem() -> str:
    """What the C++ compiler says to a file that needs the headers of Python and of C++."""
    compiler = torch_internals.cpp_compiler()
    if compiler is None:
        return ""
    include = sysconfig.get_path("include")
    command = [compiler, "-fsyntax-only", f"-I{include}", "-x", "c++", "-"]
    try:
        done = subprocess.run(
            command, input=_PYTHON_EXTENSION, capture_output=True, text=True, timeout=_SECONDS
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = _first_line(error)
    else:
        if done.returncode == 0:
            return ""
        lines = done.stderr.splitlines()
        said = next((line for line in lines if "error" in line), f"status {done.returncode}")
    return (
        f"the C++ compiler {compiler} does not work ({said.strip()}): install g++ and the headers "
        "of Python (python3-dev), or set CXX to a compiler that has both"
    )


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
