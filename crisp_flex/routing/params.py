"""RouteParams: what crisp_flex::route is told besides its tensors, as one frozen record."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from crisp_flex.config import CrispConfig

# Columns of the op's statistics, per batch and query head.
STAT_NAMES = ("kept_blocks", "visible_blocks", "c_struct", "coverage", "multiple", "route")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteParams:
    """The scalar arguments of `crisp_flex::route`, in the order of its schema.

    Args:
        scale: Factor on the logits q @ k^T, usually 1/sqrt(D).
        block_q: Query tokens per block.
        block_kv: Key tokens per block.
        policy: A name of config.POLICIES.
        dense_last_blocks: Query blocks at the end of the query range that keep all visible blocks.
        coverage: hybrid: exact attention mass to reach on the audit rows, in (0, 1].
        coverage_min: hybrid: exact mass that each audit row must reach besides; 0 for none.
        coverage_reduce: hybrid: "mean" or "min" over the audit rows.
        audit_rows: hybrid, bounded: number of audited query blocks, at 1/m, 2/m, ..., 1 of the
            valid length.
        max_error: bounded: largest error of the output on the audited rows, relative to the root
            of the mean squared norm of the heads' outputs there, in (0, 1).
        router: crisp: "c_struct", "jsd", "vs" or "pe".
        alpha: crisp: multiple of the noise floor.
        tau: crisp: c_struct at or above which a head takes the vertical-slash route.
        k_min: crisp: least number of non-anchor lines per direction.
        gamma: crisp: mass that the pooled-estimate route keeps; flexprefill: of its budgets.
        min_budget: flexprefill: least tokens of lines per direction.
        vertical_tokens: minference: tokens of verticals kept.
        slash_tokens: minference: tokens of slashes kept.
        stride: xattention: 8 or 16.
        threshold: xattention: estimated mass kept of each row, in (0, 1].
        streaming_blocks: streaming: block diagonals kept besides column 0.
        max_uncovered: Policies without an audit: mass left uncovered on the proxy rows above
            which a head keeps all blocks, in [0, 1].
    """

    scale: float
    block_q: int
    block_kv: int
    policy: str
    dense_last_blocks: int
    coverage: float
    coverage_min: float
    coverage_reduce: str
    audit_rows: int
    max_error: float
    router: str
    alpha: float
    tau: float
    k_min: int
    gamma: float
    min_budget: int
    vertical_tokens: int
    slash_tokens: int
    stride: int
    threshold: float
    streaming_blocks: int
    max_uncovered: float

    @classmethod
    def from_config(cls, config: CrispConfig, *, D: int, scale: float | None = None) -> RouteParams:
        """The parameters for one attention site of head dim D under config."""
        block_q, block_kv = config.tokens_per_block
        return cls(
            scale=1.0 / math.sqrt(D) if scale is None else scale,
            block_q=block_q,
            block_kv=block_kv,
            policy=config.policy,
            dense_last_blocks=config.dense_last_blocks,
            coverage=config.coverage,
            coverage_min=config.coverage_min,
            coverage_reduce=config.coverage_reduce,
            audit_rows=config.audit_rows,
            max_error=config.max_error,
            router=config.router,
            alpha=config.alpha,
            tau=config.tau,
            k_min=config.k_min,
            gamma=config.gamma,
            min_budget=config.min_budget,
            vertical_tokens=config.vertical_tokens,
            slash_tokens=config.slash_tokens,
            stride=config.stride,
            threshold=config.threshold,
            streaming_blocks=config.streaming_blocks,
            max_uncovered=config.max_uncovered,
        )

    @property
    def reads_values(self) -> bool:
        """Whether the policy looks at the values, too; the others must not be given them."""
        return self.policy == "bounded"

    def as_args(self) -> tuple[float | int | str, ...]:
        """The values in field order, which is the order of the op's schema."""
        return tuple(asdict(self).values())
