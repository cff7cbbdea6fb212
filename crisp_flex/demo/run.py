"""The demo from end to end: load, answer dense, answer with crisp_flex, compare, draw, report."""

from __future__ import annotations

import importlib.util
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import crisp_flex
from crisp_flex.config import BLOCK_SIZE, CrispConfig
from crisp_flex.demo.errors import DemoError
from crisp_flex.demo.measure import answer, each_layer, kl, prompt_step, top1_agreement
from crisp_flex.demo.model import LoadedModel, load
from crisp_flex.demo.prompt import Prompt, passkey_prompt
from crisp_flex.demo.screen import step, write
from crisp_flex.record import Record
from crisp_flex.report import RewriteReport
from crisp_flex.routing.ops import observe

# The KL is a mean over the last positions of the prompt.
POSITIONS = 1024
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What the command line says; see `crisp-flex demo --help`."""

    model: str | None = None
    device: str | None = None
    dtype: str | None = None
    length: int = 4096
    depth: float = 0.5
    policy: str = "hybrid"
    preset: str = "balanced"
    output: Path = Path()
    cache: Path | None = None
    json: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """What the demo found out. Seconds, nats, and shares in [0, 1]."""

    model: str
    device: str
    dtype: str
    length_tokens: int
    pass_key: str
    pass_key_position: int
    policy: str
    preset: str
    dense_answer: str
    dense_right: bool
    sparse_answer: str
    sparse_right: bool
    same_answer: bool
    positions: int
    kl: float
    top1_agreement: float
    density: float | None
    density_by_layer: list[float]
    load_s: float
    dense_prompt_s: float
    first_sparse_prompt_s: float
    sparse_prompt_s: float
    sites: int
    sites_rewritten: int
    reasons: list[str]
    picture: str | None
    report: str | None


def run(options: DemoOptions) -> DemoResult:
    """Run the demo and write what it found to stdout.

    Raises:
        DemoError: Something is missing or out of range that the user can put right.
        ConfigError: The policy or the preset does not exist.
    """
    device, dtype = device_and_dtype(options)
    if options.length < 1:
        raise DemoError(f"--length is {options.length}; it must be a number of tokens above 0.")
    if not 0.0 <= options.depth <= 1.0:
        raise DemoError(f"--depth is {options.depth}; it must lie between 0 and 1.")
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # before minutes of work
        raise DemoError(
            f"Cannot write to {options.output} ({error.strerror}): choose a folder with --output."
        ) from error
    config = CrispConfig.preset(
        options.preset,
        policy=options.policy,
        min_seqlen=min(1024, options.length),
        block_size=BLOCK_SIZE,  # the picture's grid
    )
    start = time.perf_counter()
    loaded = load(options.model, device=device, dtype=dtype, cache=options.cache)
    load_s = time.perf_counter() - start
    prompt = _prompt(loaded, options)
    result = _compare(loaded, prompt, config, options, load_s)
    write(json.dumps(asdict(result)) if options.json else describe(result))
    return result


def device_and_dtype(options: DemoOptions) -> tuple[str, torch.dtype]:
    """The device and dtype that the options mean on this machine.

    Raises:
        DemoError: There is no such device.
    """
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, number = device.partition(":")
    if kind not in ("cpu", "cuda") or not (number or "0").isdecimal():
        raise DemoError(f"--device is {device}; it must be cpu, cuda or cuda:N.")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise DemoError(
            f"--device is {device}, and torch sees no such CUDA device: use --device cpu."
        )
    # bf16 takes five times as long as fp32 on CPUs without bf16 units
    default = "bfloat16" if kind == "cuda" else "float32"
    return device, DTYPES[options.dtype or default]


def _prompt(loaded: LoadedModel, options: DemoOptions) -> Prompt:
    longest = getattr(loaded.model.config, "max_position_embeddings", None)
    if longest is not None and options.length > longest:
        raise DemoError(
            f"--length is {options.length}, and {loaded.name} takes at most {longest} tokens."
        )
    return passkey_prompt(loaded.tokenizer, options.length, depth=options.depth)


def _compare(
    loaded: LoadedModel, prompt: Prompt, config: CrispConfig, options: DemoOptions, load_s: float
) -> DemoResult:
    model, positions = loaded.model, min(POSITIONS, len(prompt.ids))
    layers = model.config.num_hidden_layers
    with step("answering, dense", layers) as advance, each_layer(model, advance):
        dense = answer(model, prompt.ids, positions=positions)

    crisp_flex.compile(model, config)
    with step("compiling and answering, sparse"), crisp_flex.record(model=model) as recorded:
        sparse = answer(model, prompt.ids, positions=positions)
    with step("the sparse prompt step again", layers) as advance, observe(lambda *_: advance()):
        _, _, again_s = prompt_step(model, prompt.ids, positions)

    sites = RewriteReport([s for report in crisp_flex.reports(model) for s in report.sites])
    dense_text, sparse_text = (first_line(loaded, a.ids) for a in (dense, sparse))
    picture, report = _files(recorded, loaded.name, options)
    return DemoResult(
        model=loaded.name,
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        length_tokens=len(prompt.ids),
        pass_key=prompt.answer,
        pass_key_position=prompt.needle[0],
        policy=options.policy,
        preset=options.preset,
        dense_answer=dense_text,
        dense_right=prompt.answer in dense_text,
        sparse_answer=sparse_text,
        sparse_right=prompt.answer in sparse_text,
        same_answer=dense_text == sparse_text,
        positions=positions,
        kl=kl(dense.logits, sparse.logits),
        top1_agreement=top1_agreement(dense.logits, sparse.logits),
        density=recorded.density if recorded.rows else None,
        density_by_layer=[row.density for row in recorded.rows],
        load_s=load_s,
        dense_prompt_s=dense.prompt_s,
        first_sparse_prompt_s=sparse.prompt_s,
        sparse_prompt_s=again_s,
        sites=len(sites.sites),
        sites_rewritten=len(sites.rewritten),
        reasons=sorted({str(site.rejection) for site in sites.rejected}),
        picture=picture,
        report=report,
    )


def first_line(loaded: LoadedModel, ids: list[int]) -> str:
    """The answer in the generated tokens: their text up to the end of its first line."""
    return str(loaded.tokenizer.decode(ids)).strip().split("\n", 1)[0]


def _files(recorded: Record, name: str, options: DemoOptions) -> tuple[str | None, str | None]:
    """Paths of the PNG and the HTML; None where nothing ran sparsely or matplotlib is missing."""
    if not recorded.rows or importlib.util.find_spec("matplotlib") is None:
        return None, None
    picture = (options.output / f"crisp-flex-{options.policy}-{options.length}.png").resolve()
    title = f"{name}, {options.length} tokens, {options.policy} ({options.preset})"
    try:
        recorded.plot(title=title).savefig(picture, dpi=120)
    except OSError as error:
        raise DemoError(
            f"Cannot write {picture} ({error}): choose a folder with --output."
        ) from error
    report = picture.with_suffix(".html")
    recorded.save_html(report)
    return str(picture), str(report)


def describe(result: DemoResult) -> str:
    """The result as text for people."""
    r = result
    rows = [
        ("", "dense, eager", "crisp_flex"),
        ("answer", repr(r.dense_answer), repr(r.sparse_answer)),
        (f"has the key {r.pass_key}", _yes(r.dense_right), _yes(r.sparse_right)),
        ("prompt step", f"{r.dense_prompt_s:.2f} s", f"{r.sparse_prompt_s:.2f} s"),
    ]
    width = max(len(row[1]) for row in rows) + 2
    lines = [
        f"{r.model}, {r.length_tokens} tokens, pass key at {r.pass_key_position}, "
        f"{r.device}, {r.dtype}, {r.policy} ({r.preset})",
        "",
        *(f"{name:20}{left:{width}}{right}" for name, left, right in rows),
        "",
        f"Next-token distributions, last {r.positions} positions: KL(dense || sparse) {r.kl:.4f}, "
        f"same best token {r.top1_agreement:.1%}",
        f"Attention calls rewritten: {r.sites_rewritten} of {r.sites}",
        *(f"  left dense: {reason}" for reason in r.reasons),
        *_density_lines(r),
        f"Loading {r.load_s:.1f} s, first sparse prompt step with its compilation "
        f"{r.first_sparse_prompt_s:.1f} s",
    ]
    if r.picture is not None:
        lines += [f"Block masks: {r.picture}", f"Report, to open in a browser: {r.report}"]
    elif r.density is not None:
        lines.append("No picture of the block masks: pip install 'crisp-flex[bench]'")
    return "\n".join(lines)


def _yes(answer: bool) -> str:
    return "yes" if answer else "no"


def _density_lines(r: DemoResult) -> list[str]:
    if r.density is None:
        return ["Nothing ran sparsely."]
    lines = [f"Blocks kept: {r.density:.1%} of the causal ones; by layer, in percent:"]
    for first in range(0, len(r.density_by_layer), 10):
        ten = r.density_by_layer[first : first + 10]
        lines.append(f"  {first:>4}: " + "".join(f"{100 * density:5.0f}" for density in ten))
    return lines
