"""`crisp-flex doctor`: what is installed, what will run here, what is known to go wrong."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
from dataclasses import asdict, dataclass

import torch

from crisp_flex import gpu_table, toolchain, torch_internals
from crisp_flex.demo.screen import write

_OLDEST_TORCH = (2, 11)
_WIDE_HEADS_SHARED_BYTES = 160 * 1024
# Variables under which nothing is compiled, or kernels run in Python.
_NOTHING = "torch.compile does nothing, so every call stays dense: unset it"
_TRAPS = {
    "TORCH_COMPILE_DISABLE": ("fail", _NOTHING),
    "TORCHDYNAMO_DISABLE": ("fail", _NOTHING),
    "TRITON_INTERPRET": (
        "note",
        "Triton kernels run in Python, thousands of times slower: unset it",
    ),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was looked at, "ok", "note" or "fail", and a sentence."""

    what: str
    state: str
    text: str


def run(*, as_json: bool) -> int:
    """Write the findings to stdout; 0 if crisp_flex can run here, else 1."""
    found = findings()
    failed = any(finding.state == "fail" for finding in found)
    if as_json:
        write(json.dumps({"ok": not failed, "findings": [asdict(f) for f in found]}))
    else:
        width = max(len(finding.what) for finding in found)
        lines = [f"{f.state:4}  {f.what:{width}}  {f.text}" for f in found]
        end = "crisp_flex can run here: crisp-flex demo shows it at work"
        if failed:
            end = "crisp_flex cannot run here: put right what is marked fail"
        write("\n".join([*lines, end]))
    return int(failed)


def findings() -> list[Finding]:
    """All findings, in the order in which to read them."""
    found = [_torch()]
    if torch.cuda.is_available():
        found += [_triton(), *_gpu(), _flash()]
    else:
        found += _cpu()
    found += [
        Finding(name, state, f"is set to {os.environ[name]!r}; {text}")
        for name, (state, text) in _TRAPS.items()
        if os.environ.get(name, "0") not in ("", "0")
    ]
    missing = [
        name
        for name in ("transformers", "gguf", "matplotlib", "rich")
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        text = f"{', '.join(missing)} missing: pip install 'crisp-flex[hf,bench]' for the demo"
        found.append(Finding("extras", "note", text))
    return found


def _torch() -> Finding:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < _OLDEST_TORCH:
        text = f"{torch.__version__} is too old: pip install 'torch>=2.11'"
        return Finding("torch", "fail", text)
    return Finding("torch", "ok", torch.__version__)


def _triton() -> Finding:
    if problem := toolchain.missing("cuda"):
        return Finding(
            "triton", "fail", f"{problem}. Until then every call stays dense, uncompiled"
        )
    import triton  # its distribution has other names in other channels, so no look at metadata

    return Finding("triton", "ok", triton.__version__)


def _gpu() -> list[Finding]:
    found = []
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        properties = torch.cuda.get_device_properties(device)
        capability = torch.cuda.get_device_capability(device)
        row = gpu_table.gpu_of(device)
        name = f"cuda:{index}"
        if capability < (8, 0):
            text = f"{properties.name} (sm_{capability[0]}{capability[1]}) is older than sm_80"
            found.append(Finding(name, "fail", f"{text}: bfloat16 kernels do not run"))
            continue
        text = f"{properties.name}: sparse from {row.min_seqlen} tokens ({row.min_seqlen_evidence})"
        found.append(Finding(name, "ok" if capability in gpu_table.GPUS else "note", text))
        shared = getattr(properties, "shared_memory_per_block_optin", 0)
        if shared < _WIDE_HEADS_SHARED_BYTES:
            text = (
                f"{shared // 1024} KB of shared memory: head dims above 128 select with plain "
                "PyTorch, which costs more than it saves"
            )
            found.append(Finding(name, "note", text))
    return found


def _flash() -> Finding:
    if problem := toolchain.flash_problem():
        text = f"{problem} (sm_90, sm_100). Until then attention runs on TRITON"
        return Finding("FLASH", "note", text)
    try:
        version = importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        version = "of unknown version"
    takes = [
        str(index)
        for index in range(torch.cuda.device_count())
        if gpu_table.gpu_of(torch.device("cuda", index)).flash
    ]
    if not takes:
        return Finding("FLASH", "note", f"flash-attn-4 {version}, but no GPU here takes it: TRITON")
    return Finding("FLASH", "ok", f"flash-attn-4 {version}, on GPU {', '.join(takes)}")


def _cpu() -> list[Finding]:
    found = [
        Finding("GPU", "note", "torch sees none; the CPU gives right results, and no speed-up")
    ]
    if problem := toolchain.diagnose("cpu"):
        text = f"{problem}. Until then every call stays dense, uncompiled"
        found.append(Finding("C++ compiler", "fail", text))
    else:
        found.append(Finding("C++ compiler", "ok", str(torch_internals.cpp_compiler())))
    if torch_internals.cpu_has_flex():
        found.append(
            Finding("CPU kernel", "ok", "FlexAttention in C++; blocks are chosen by plain PyTorch")
        )
    else:
        text = "FlexAttention does not run on this CPU (AVX2 and Linux are needed): calls are dense"
        found.append(Finding("CPU kernel", "fail", text))
    return found
