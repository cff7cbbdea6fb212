"""One attention layer, sparse against dense SDPA, on this machine: checked, then timed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from crisp_flex import attention, flex_hop, torch_internals
from crisp_flex.bench import exact
from crisp_flex.bench.recommend import Row
from crisp_flex.bench.structured import structured
from crisp_flex.bench.timing import gpu_time
from crisp_flex.config import PRESETS, CrispConfig
from crisp_flex.errors import CrispFlexError, UnavailableError
from crisp_flex.record import record

# Query blocks a call whose true attention mass is measured.
AUDITED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The attention heads of a layer: query heads, key heads (a divisor), head dim."""

    Hq: int
    Hkv: int
    D: int

    def __str__(self) -> str:
        return f"{self.Hq}/{self.Hkv} heads, D {self.D}"


@torch.no_grad()
def measure_layer(
    layer: Layer,
    lengths: Iterable[int],
    *,
    device: str,
    dtype: torch.dtype,
    backend: str = "auto",
    budget_ms: float = 300.0,
    advance: Callable[[], None] = lambda: None,
) -> list[Row]:
    """A row per length and preset, on inputs with structure.

    Nothing is timed whose result does not match fp32 attention on sampled query blocks.

    Args:
        layer: The heads.
        lengths: Tokens, each at least 1.
        device: "cpu", "cuda" or "cuda:N".
        dtype: float32, float16 or bfloat16.
        backend: As in CrispConfig.
        budget_ms: Milliseconds that the repeats of one figure may take.
        advance: Called after each row.

    Raises:
        CrispFlexError: A result is wrong, or no dense SDPA kernel takes these tensors.
        UnavailableError: FlexAttention does not run on this CPU, or FLASH is asked for and absent.
    """
    if device == "cpu" and not torch_internals.cpu_has_flex():
        raise UnavailableError(
            "FlexAttention does not run on this CPU (Linux and AVX2 are needed): "
            "run it where crisp-flex doctor finds nothing wrong"
        )
    rows = []
    for length in sorted(lengths):
        q, k, v = structured(layer, length, dtype=dtype, device=device)
        dense, dense_ms = fastest_sdpa(q, k, v, budget_ms=budget_ms)
        for preset in PRESETS:
            rows.append(
                _row(q, k, v, preset, backend, dense=dense, dense_ms=dense_ms, budget_ms=budget_ms)
            )
            advance()
    return rows


def sdpa_calls(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], Tensor]]:
    """The causal SDPA kernels to try on these tensors, by name; a call may raise RuntimeError."""
    backends = {
        "cuDNN": SDPBackend.CUDNN_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
    }
    if q.device.type == "cpu":
        backends = {"CPU": SDPBackend.FLASH_ATTENTION}

    def call(backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return {name: functools.partial(call, backend) for name, backend in backends.items()}


def fastest_sdpa(q: Tensor, k: Tensor, v: Tensor, *, budget_ms: float) -> tuple[str, float]:
    """Name and milliseconds of the fastest dense SDPA kernel whose result is right.

    Raises:
        CrispFlexError: There is none for these tensors.
    """
    rows = exact.sampled_rows(q.shape[2])
    wanted = exact.wanted_rows(q, k, v, rows)
    times = {}
    for name, call in sdpa_calls(q, k, v).items():
        try:
            if exact.relative_error(call(), wanted, rows) < exact.MOST_ERROR:
                times[name] = gpu_time(call, budget_ms=budget_ms)[0]
        except RuntimeError:  # a dtype, a head dim or a GPU that this kernel does not take
            continue
    if not times:
        raise CrispFlexError(
            f"no dense SDPA kernel takes {str(q.dtype).removeprefix('torch.')} and head dim "
            f"{q.shape[3]} here, so there is nothing to compare with: try --dtype bfloat16"
        )
    name = min(times, key=lambda name: times[name])
    return name, times[name]


def _row(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    preset: str,
    backend: str,
    *,
    dense: str,
    dense_ms: float,
    budget_ms: float,
) -> Row:
    config = CrispConfig.preset(preset, backend=backend, min_seqlen=1)
    config = flex_hop.settle(config, q, v, captures=False)
    rows = exact.sampled_rows(q.shape[2])
    wanted = exact.wanted_rows(q, k, v, rows, attention.route(q, k, config, value=v))
    sparse = functools.partial(attention.sparse_attention, q, k, v, config=config)
    with record(audit=AUDITED) as recorded:
        out = sparse()
    error = exact.relative_error(out, wanted, rows)
    if not error < exact.MOST_ERROR:
        raise CrispFlexError(
            f"sparse attention is wrong at {q.shape[2]} tokens (relative error {error:.1e}), so "
            "it was not timed: please report this with what crisp-flex doctor prints"
        )
    (kept,) = recorded.rows
    sparse_ms, timed = gpu_time(sparse, budget_ms=budget_ms)
    return Row(
        length=q.shape[2],
        preset=preset,
        kernel=flex_hop.choose_kernel(
            q.device,
            q.dtype,
            D=q.shape[3],
            Dv=v.shape[3],
            block_size=config.tokens_per_block,
            backend=config.backend,
            captures=False,
        ),
        density=kept.density,
        mass=sum(kept.mass) / len(kept.mass),
        error=error,
        dense=dense,
        dense_ms=dense_ms,
        sparse_ms=sparse_ms,
        timed=timed,
    )
