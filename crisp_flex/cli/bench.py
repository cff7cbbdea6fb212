"""`crisp-flex bench`: where sparse attention pays on this machine, written as a config file."""

from __future__ import annotations

import argparse
import contextlib
import json
from dataclasses import asdict
from pathlib import Path

import torch

from crisp_flex import config_file
from crisp_flex.bench.attention import Layer, measure_layer
from crisp_flex.bench.recommend import Recommendation, Row, recommend
from crisp_flex.bench.timing import machine
from crisp_flex.config import PRESETS
from crisp_flex.demo.run import DemoOptions, device_and_dtype
from crisp_flex.demo.screen import step, write
from crisp_flex.errors import ConfigError, CrispFlexError

_LEAST_TOKENS = 256
# By kind of device: the heads of Llama 3.1 8B and of SmolLM2-135M, and lengths that take a minute.
_LAYERS = {"cuda": Layer(Hq=32, Hkv=8, D=128), "cpu": Layer(Hq=9, Hkv=3, D=64)}
_LENGTHS = {"cuda": (2048, 4096, 8192, 16384, 32768), "cpu": (1024, 2048, 4096)}


def run(arguments: argparse.Namespace) -> None:
    """Measure, write the table to stdout and, with --out, a config file.

    Raises:
        ConfigError: A value is out of range.
        CrispFlexError: A result is wrong, or the file cannot be written.
        DemoError: There is no such device.
    """
    device, dtype = device_and_dtype(DemoOptions(device=arguments.device, dtype=arguments.dtype))
    kind = device.partition(":")[0]
    layer = _layer(arguments, _LAYERS[kind])
    lengths = sorted(set(arguments.lengths or _LENGTHS[kind]))
    if lengths[0] < _LEAST_TOKENS:
        raise ConfigError(
            f"--lengths has {lengths[0]}: give lengths of at least {_LEAST_TOKENS} tokens"
        )
    if not arguments.budget > 0:
        raise ConfigError(f"--budget is {arguments.budget}: give seconds above 0")
    on = torch.cuda.device(device) if kind == "cuda" else contextlib.nullcontext()
    with on, step("measuring", len(lengths) * len(PRESETS)) as advance:
        rows = measure_layer(
            layer,
            lengths,
            device=device,
            dtype=dtype,
            backend=arguments.backend,
            budget_ms=1e3 * arguments.budget,
            advance=advance,
        )
    found = recommend(rows)
    what = f"{layer}, {str(dtype).removeprefix('torch.')}"
    if arguments.out is not None:
        _save(arguments.out, found, what)
    if arguments.json:
        write(json.dumps(_to_dict(rows, found, what)))
    else:
        write(describe(rows, found, what))
        if arguments.out is not None:
            write(f'Config file: {arguments.out}; crisp_flex.compile(model, "{arguments.out}")')


def _layer(arguments: argparse.Namespace, default: Layer) -> Layer:
    Hq = arguments.query_heads or default.Hq
    # a model's query heads given alone: no grouping
    Hkv = arguments.key_heads or (Hq if arguments.query_heads else default.Hkv)
    D = arguments.head_dim or default.D
    if min(Hq, Hkv) < 1 or Hq % Hkv:
        raise ConfigError(
            f"--query-heads is {Hq} and --key-heads {Hkv}: the first must be a multiple of the "
            "second, as in the model's config"
        )
    if D < 16 or D > 256 or D % 8:
        raise ConfigError(f"--head-dim is {D}: give a multiple of 8 from 16 to 256")
    return Layer(Hq=Hq, Hkv=Hkv, D=D)


def describe(rows: list[Row], found: Recommendation, what: str) -> str:
    """The rows and the recommendation as text for people."""
    about = machine()
    lines = [
        f"{about['machine']}, torch {about['torch']}: {what}, inputs with structure, medians in ms",
        "",
        f"{'tokens':>7}  {'preset':9} {'kernel':7} {'kept':>6} {'mass':>6} "
        f"{'dense':>9} {'sparse':>9} {'dense/sparse':>12}",
    ]
    for row in rows:
        lines.append(
            f"{row.length:7}  {row.preset:9} {row.kernel:7} {row.density:6.1%} {row.mass:6.3f} "
            f"{row.dense_ms:9.3f} {row.sparse_ms:9.3f} {row.ratio:12.2f}"
        )
    dense = ", ".join(sorted({row.dense for row in rows}))
    return "\n".join(
        [
            *lines,
            "",
            f"kept: blocks of the causal ones; mass: attention mass in them; dense: SDPA ({dense})",
            f"Recommended: {found}",
        ]
    )


def _save(file: Path, found: Recommendation, what: str) -> None:
    about = machine()
    text = config_file.dump(
        {"preset": found.preset, "min_seqlen": found.min_seqlen},
        comments=(
            f"crisp-flex bench, {about['date']}, {about['machine']}, torch {about['torch']}",
            f"{what}: {found}",
        ),
    )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CrispFlexError(
            f"cannot write {file} ({error.strerror}): give --out a file in a folder of yours"
        ) from error


def _to_dict(rows: list[Row], found: Recommendation, what: str) -> dict[str, object]:
    return {
        **machine(),
        "layer": what,
        "rows": [{**asdict(row), "ratio": row.ratio} for row in rows],
        "recommended": asdict(found),
    }
