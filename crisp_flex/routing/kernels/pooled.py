"""Logits of the pooled map on tensor cores, shared by the stages `audit` and `select`.

Oracle: routing.pool.pooled_map. A mean is split into two fp16 numbers after scaling by a power of
two, hi = fp16(x), lo = fp16(x - hi): together 2^-24 of the largest element of its vector. Three
dots, hi hi + hi lo + lo hi, then have the accuracy of fp32 at the speed of tensor cores.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SplitKeys:
    """Pooled keys as fp16 pairs: mean = scale * (parts[0] + parts[1]).

    Attributes:
        parts: [2, B, Hkv, Nkv, D] fp16.
        scale: [B, Hkv, Nkv] fp32, powers of two.
    """

    parts: Tensor
    scale: Tensor


@triton.jit
def split(x):
    """x [M, D] fp32 as hi, lo [M, D] fp16 and scale [M] fp32 with x = scale * (hi + lo).

    NaN stays NaN, and what stands beside it in its vector stays what it is.
    """
    largest = tl.max(tl.abs(x), 1)
    # the power of two at or below it, by its exponent bits, within what has a normal inverse
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 0xFF
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    x = x * inverse[:, None]  # below 2, or 4 at the far end of the range
    hi = x.to(tl.float16)
    lo = (x - hi.to(tl.float32)).to(tl.float16)
    return hi, lo, scale


@triton.jit
def load_rows(mean_q_ptr, row, there, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Pooled queries row [M] int64 of mean_q [.., D] fp32, split; zero where not there."""
    d = tl.arange(0, BLOCK_D)
    ptrs = mean_q_ptr + row[:, None] * D + d[None, :]
    return split(tl.load(ptrs, mask=there[:, None] & (d < D)[None, :], other=0.0))


@triton.jit
def pooled_logits(
    hi, lo, factor, parts_ptr, low_stride, scale_ptr, blk, Nkv, D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """[M, N] fp32: split queries over pooled keys blk [N], times factor [M]; 0 where blk >= Nkv.

    parts_ptr and scale_ptr stand at the first block of the KV head, low_stride elements before the
    lower parts.
    """
    d = tl.arange(0, BLOCK_D)
    there = blk < Nkv
    ptrs = parts_ptr + blk[None, :] * D + d[:, None]
    mask = there[None, :] & (d < D)[:, None]
    k_hi = tl.load(ptrs, mask=mask, other=0.0)
    k_lo = tl.load(ptrs + low_stride, mask=mask, other=0.0)
    dots = tl.dot(hi, k_lo)
    dots = tl.dot(lo, k_hi, dots)
    dots = tl.dot(hi, k_hi, dots)
    scale = tl.load(scale_ptr + blk, mask=there, other=0.0)
    return dots * factor[:, None] * scale[None, :]
