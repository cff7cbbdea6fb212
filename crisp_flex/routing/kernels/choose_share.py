"""Stage `output_error` of policy "bounded" on the GPU, last part: what a head may leave out.

Oracle: the audit of policies.bounded. Reads a few numbers per sampled row; bound by latency.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from crisp_flex.routing.kernels.left_out import left_out
from crisp_flex.routing.kernels.output_error import SLOTS, Errors
from crisp_flex.routing.output_error import SAMPLED_ROWS
from crisp_flex.routing.policies.bounded import LEFT_OUT

# Sampled rows of the layer whose norms are added up at once.
CHUNK = 256


@dataclass(frozen=True, slots=True)
class Choice:
    """What the audit says per head.

    Attributes:
        share: [B, Hq] fp32: left-out share, -1 for all blocks.
        coverage: [B, Hq] fp32: exact mass kept on the sampled rows with it.
        c_struct: [B, Hq] fp32: of the last audited block's sampled rows.
    """

    share: Tensor
    coverage: Tensor
    c_struct: Tensor


def choose_share(errors: Errors, *, max_error: float) -> Choice:
    """The largest left-out share of each head whose output error is within max_error.

    Args:
        errors: Of output_error.
        max_error: Relative to the root mean square of the heads' outputs.
    """
    B, Hq, audit_rows = errors.error.shape[:3]
    chosen = Choice(*(errors.error.new_empty((B, Hq)) for _ in range(3)))
    _choose_kernel[(B * Hq,)](
        errors.error,
        errors.mass,
        errors.facts,
        chosen.share,
        chosen.coverage,
        chosen.c_struct,
        Hq,
        audit_rows * SAMPLED_ROWS,
        audit_rows,
        max_error * max_error,
        LEFT_OUT=LEFT_OUT,
        ROWS=SAMPLED_ROWS,
        SLOTS=SLOTS,
        CHUNK=CHUNK,
    )
    return chosen


@triton.jit(do_not_specialize=["Hq", "rows", "audits"])
def _choose_kernel(
    error_ptr,
    mass_ptr,
    facts_ptr,
    share_ptr,
    coverage_ptr,
    c_struct_ptr,
    Hq,
    rows,
    audits,
    squared_bound,
    LEFT_OUT: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (B * Hq,): the first candidate whose error is within the bound; rows is of a head."""
    bh = tl.program_id(0).to(tl.int64)  # before the first multiply
    slot = tl.arange(0, SLOTS)
    r = tl.arange(0, ROWS)
    error = tl.zeros([ROWS, SLOTS], tl.float32)
    mass = tl.zeros([ROWS, SLOTS], tl.float32)
    number = tl.zeros([ROWS], tl.float32)
    for step in range(audits):
        piece = (bh * audits + step) * ROWS + r
        at = piece[:, None] * SLOTS + slot[None, :]
        error += tl.load(error_ptr + at)
        mass += tl.load(mass_ptr + at)
        number += tl.load(facts_ptr + piece * 4 + 1)
    norms = tl.zeros([CHUNK], tl.float32)
    layer = (bh // Hq) * Hq * rows
    for i in range(0, Hq * rows, CHUNK):
        at = i + tl.arange(0, CHUNK)
        norms += tl.load(facts_ptr + (layer + at) * 4, mask=at < Hq * rows, other=0.0)
    bound = tl.sum(norms, 0) / Hq * squared_bound
    # no error is within a bound of Inf or NaN, and none of NaN within any
    bound = tl.where(bound < float("inf"), bound, -1.0)
    fits = (tl.sum(error, 0) <= bound) & (slot < SLOTS - 1)
    chosen = tl.min(tl.where(fits, slot, SLOTS - 1), 0)
    count = tl.sum(number, 0)
    reached = tl.sum(tl.where(slot == chosen, tl.sum(mass, 0), 0.0), 0) / tl.maximum(count, 1.0)
    whole = (chosen == SLOTS - 1) | (count == 0)
    tl.store(share_ptr + bh, left_out(chosen, LEFT_OUT))
    tl.store(coverage_ptr + bh, tl.where(whole, 1.0, reached))
    last = facts_ptr + ((bh * audits + audits - 1) * ROWS + r) * 4
    valid = tl.maximum(tl.sum(tl.load(last + 3), 0), 1.0)
    tl.store(c_struct_ptr + bh, tl.sum(tl.load(last + 2), 0) / valid)
