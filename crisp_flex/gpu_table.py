"""What is known of each kind of GPU: kernel options, FLASH's block sizes, where sparse pays.

Rows are looked up by compute capability. Every number carries its evidence: the card, the date and
the command, or that nothing was run and what it rests on instead.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from crisp_flex.config import MIN_SEQLEN

HALF = (torch.float16, torch.bfloat16)
_OFFLINE = (
    "not run: 2 to 3 stages of K and V tiles fit the shared memory and no register is spilled, by "
    "arithmetic and by compiling the kernel offline (tests/cuda_template/offline.py, torch 2.13, "
    "Triton 3.6, 2026-11-30)"
)


@dataclass(frozen=True, slots=True)
class Tuned:
    """Options of FlexAttention's forward Triton kernel in fp16 or bf16, for one class of D."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int
    evidence: str
    USE_TMA: bool = False

    def options(self, D: int, block_size: tuple[int, int]) -> dict[str, Any]:
        """The kernel options, with tiles that divide the blocks."""
        tile_q, tile_kv = min(self.BLOCK_M, block_size[0]), min(self.BLOCK_N, block_size[1])
        options: dict[str, Any] = {
            "BLOCK_M": tile_q,
            "BLOCK_N": tile_kv,
            "num_warps": self.num_warps if tile_q == self.BLOCK_M else 4,
            "num_stages": self.num_stages,
        }
        # a descriptor's tile has the rounded head dim, so only whole ones are taken
        if self.USE_TMA and D & (D - 1) == 0:
            options["USE_TMA"] = True
        return options


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One row of the table.

    Args:
        cards: What it is about, for people.
        triton: By class of head dims (64 is D <= 64, 128 is 64 < D <= 128, 256 the rest).
        flash: (query, key) block sizes that FLASH takes, best first, by the largest head dim.
        flash_only: Head dims of `flash` that are known to work exactly, where not all below do.
        flash_evidence: What `flash` rests on.
        min_seqlen: Query tokens from which selection and sparse attention beat dense SDPA.
        min_seqlen_evidence: What that rests on.
    """

    cards: str
    triton: Mapping[int, Tuned] = field(default_factory=dict)
    flash: Mapping[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    flash_only: frozenset[int] = frozenset()
    flash_evidence: str = ""
    min_seqlen: int = MIN_SEQLEN
    min_seqlen_evidence: str = "not run: the length measured on the H200"

    def flash_block_sizes(self, D: int) -> tuple[tuple[int, int], ...]:
        """The (query, key) block sizes that FLASH takes at head dim D, best first; maybe none."""
        if D % 8:
            return ()
        largest = head_dim_class(D, self.flash)
        if largest is None or (largest in self.flash_only and largest != D):
            return ()
        return self.flash[largest]


def head_dim_class(D: int, classes: Mapping[int, Any]) -> int | None:
    """The smallest class that D fits into, None where all are smaller."""
    return min((largest for largest in classes if largest >= D), default=None)


_TUNED = "NVIDIA H200, torch 2.11, 2026-11-30, tune_flex.py at 64k: "
_SM_90 = Gpu(
    cards="H100, H200 (227 KB of shared memory)",
    triton={
        64: Tuned(
            64,
            128,
            4,
            3,
            _TUNED + "295 TFLOP/s, Inductor's own 283; 14/2 heads, 14 % kept, eight tried",
        ),
        128: Tuned(
            128,
            128,
            8,
            2,
            "NVIDIA H200, torch 2.11, 2026-11: 453 to 460 TFLOP/s where the default gives 414 "
            "(D 128, bf16, 10 % density at 128k); the best of six tried",
            USE_TMA=True,
        ),
        256: Tuned(
            128,
            64,
            8,
            2,
            _TUNED + "396 TFLOP/s, Inductor's own 263; 16/4 heads, 9 % kept, seven tried",
            USE_TMA=True,
        ),
    },
    flash={128: ((128, 128), (128, 64)), 256: ((128, 64),)},
    flash_only=frozenset({256}),
    flash_evidence=(
        "NVIDIA H200, torch 2.11, flash-attn-4 4.0.0b36, 2026-11, 10 % density at 128k: D 128 643 "
        "TFLOP/s with key blocks of 128 and 534 with 64; D 256 639 with 64, and 128 is refused. A "
        "key block must equal the kernel's tile, which is 112 for D 192"
    ),
    min_seqlen_evidence=(
        "NVIDIA H200, torch 2.11, 2026-11-30, bench_attention.py at 8k: 2.2 times the fastest SDPA "
        "at 23 % density (32/8, D 128), 1.9 times on SmolLM2's own q and k (36/12, D 64)"
    ),
)
_SM_100 = Gpu(
    cards="B200, GB200 (227 KB of shared memory)",
    flash={128: ((128, 128),)},
    flash_evidence="not run: flash-attn-4 has a block-sparse forward for it (read in its source)",
)
_SM_80 = Gpu(
    cards="A100, A800 (163 KB of shared memory)",
    triton={
        64: Tuned(128, 64, 4, 3, _OFFLINE),
        128: Tuned(128, 64, 8, 3, _OFFLINE),
        256: Tuned(64, 64, 8, 2, _OFFLINE),
    },
)
_SM_89 = Gpu(
    cards="A10, RTX 30 and 40, L4, L40 (99 KB of shared memory)",
    triton={
        64: Tuned(128, 64, 4, 3, _OFFLINE),
        128: Tuned(128, 32, 8, 2, _OFFLINE),
        256: Tuned(64, 32, 8, 2, _OFFLINE),
    },
)
_SM_120 = Gpu(
    cards="RTX 50, RTX PRO Blackwell (99 KB of shared memory)",
    triton={
        64: Tuned(128, 64, 4, 2, _OFFLINE),
        128: Tuned(128, 32, 8, 2, _OFFLINE),
        256: Tuned(64, 32, 8, 2, _OFFLINE),
    },
)
_UNKNOWN = Gpu(cards="every other device", min_seqlen_evidence="not run")

GPUS: Mapping[tuple[int, int], Gpu] = MappingProxyType(
    {
        (8, 0): _SM_80,
        (8, 6): _SM_89,
        (8, 9): _SM_89,
        (9, 0): _SM_90,
        (10, 0): _SM_100,
        (10, 3): _SM_100,
        (12, 0): _SM_120,
        (12, 1): _SM_120,
    }
)


def gpu_of(device: torch.device) -> Gpu:
    """The row of a device; for the CPU and what is not in the table, one without kernel options."""
    if device.type != "cuda":
        return _UNKNOWN
    return GPUS.get(torch.cuda.get_device_capability(device), _UNKNOWN)


def triton_options(
    device: torch.device, dtype: torch.dtype, D: int, block_size: tuple[int, int]
) -> dict[str, Any]:
    """Options of FlexAttention's Triton kernel; {} leaves them to Inductor.

    The tiles always divide the blocks: where Inductor's own might not (blocks below 128), and the
    table has no row, small ones are set.
    """
    gpu = gpu_of(device)
    largest = head_dim_class(D, gpu.triton)
    if dtype in HALF and largest is not None:
        return gpu.triton[largest].options(D, block_size)
    return _small_tiles(D, block_size) if min(block_size) < 128 else {}


@functools.cache
def _small_tiles(D: int, block_size: tuple[int, int]) -> dict[str, Any]:
    # fp32, D 128: Q 32 KB and two stages of K and V 32 KB each, 96 KB
    tile = Tuned(64 if D <= 128 else 32, 32, 4, 2, "not run: shared-memory arithmetic")
    return tile.options(D, block_size)
