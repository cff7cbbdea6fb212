"""The selections under trial, in the order of their importance."""

from __future__ import annotations

from dataclasses import dataclass, replace

# Multiples of the floor from the sparsest to all blocks: today's grid, and one with finer steps.
TODAY = (8.0, 4.0, 2.0, 1.0, 0.5, 0.25, 0.1)
FINE = tuple(2.0 ** (x / 2) for x in range(10, -9, -1))
# The largest share of a row's pooled mass that is left out (1 - top-p).
LEFT_OUT = (0.6, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1, 0.07, 0.05, 0.03, 0.02, 0.01, 0.005, 0.001)

# Multiples of the lines that go with LEFT_OUT.
TIED = (32.0, 16.0, 16.0, 8.0, 8.0, 8.0, 4.0, 4.0, 4.0, 2.0, 2.0, 2.0, 1.0, 1.0, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One selection. The defaults are policy "hybrid", preset balanced."""

    name: str
    block: int = 128  # key tokens per block; a query block has 128
    # estimate of a row's block masses
    pool_k: int = 0  # tokens per pooled key, 0: the block; 1: every key by itself
    pool_q: int = 128  # tokens per pooled query
    over_q: str = "mean"  # mean or max over a block's pooled queries
    spread: bool = False  # add half the variance of a pooled key's logits to its logit
    value: bool = False  # times the distance of the block's mean value from the mean value so far
    share: bool = False  # one selection per KV head
    # threshold
    rule: str = "floor"  # floor | top-p | common: one mass for all rows and heads
    grid: tuple[float, ...] = TODAY
    lines: float = 2.0  # multiple of the lines over that of the rows, 0: no lines
    fixed_lines: bool = False  # `lines` is the multiple itself
    line_grid: tuple[float, ...] = ()  # the lines' multiple at each grid value, if given
    # audit
    rows: int = 4
    sample: int = 128  # query rows of an audited block that are looked at, evenly spaced
    target: float = 0.9  # coverage, or 1 - relative output error
    measure: str = "mass"  # mass | error
    reduce: str = "mean"  # mean or min over the audit rows
    least: float = 0.0  # the smallest coverage of any audit row, with reduce mean
    norm: str = "head"  # the error is relative to the head's output, or to the layer's mean head
    scope: str = "head"  # head | layer | segment: rows up to an audit row follow that row
    # one pooled key and value for each `correct` dropped keys, 0: none
    correct: int = 0
    second: bool = False  # with half the variance of its logits


def _many(base: Variant, **ranges: tuple[object, ...]) -> list[Variant]:
    ((field, values),) = ranges.items()
    return [
        replace(base, name=f"{base.name} {field} {value}", **{field: value}) for value in values
    ]


_mass = Variant(name="mass")
_fixed = Variant(name="corrected", correct=128)
_both = Variant(name="corrected 2nd", correct=128, second=True)
_error = Variant(name="error 2nd", correct=128, second=True, measure="error", grid=FINE)
_error_plain = Variant(name="error, no correction", measure="error", grid=FINE)
_small = Variant(name="k64", block=64)
_layer = replace(_error, name="error 2nd, layer", scope="layer")
_common = replace(
    _error, name="error 2nd, common", scope="layer", rule="common", lines=4.0, fixed_lines=True
)

_kept = Variant(name="E", measure="error", norm="layer", grid=FINE)
_coarse = replace(_kept, name="E coarse", grid=TODAY)
_exact = replace(_kept, name="E exact", pool_k=1, pool_q=64)
_exact_p = replace(
    _exact, name="E exact top-p", rule="top-p", grid=LEFT_OUT, lines=4.0, fixed_lines=True
)
_tied = replace(_exact_p, name="E exact top-p tied", line_grid=TIED)
_no_lines = replace(_exact_p, name="E exact top-p no lines", lines=0.0)

_bounded = replace(_no_lines, name="bounded", pool_q=128, sample=8)

VARIANTS: list[Variant] = [
    *_many(_bounded, target=(0.87, 0.9, 0.85, 0.92, 0.8)),
    *_many(replace(_bounded, target=0.87, name="bounded .87"), sample=(128, 32, 16, 4)),
    *_many(replace(_bounded, target=0.87, name="bounded .87"), pool_q=(64, 32)),
    *_many(replace(_bounded, target=0.87, name="bounded .87"), rows=(8, 16)),
    *_many(replace(_bounded, target=0.87, name="bounded .87"), block=(64, 32)),
    *_many(replace(_bounded, target=0.87, name="bounded .87"), norm=("head",)),
    *_many(replace(_bounded, target=0.87, name="bounded .87 max", reduce="min"), rows=(4, 8)),
    replace(_bounded, name="bounded .87 segments", target=0.87, scope="segment", sample=32, rows=8),
    replace(_bounded, name="bounded .87 value", target=0.87, value=True),
    replace(_bounded, name="bounded .87 shared", target=0.87, share=True),
    # today's frontier, then the error audit with better estimates
    *_many(_mass, target=(0.9, 0.8, 0.95, 0.7)),
    *_many(_no_lines, target=(0.87, 0.9, 0.85)),
    *_many(replace(_no_lines, name="E exact top-p no lines k64", block=64), target=(0.87, 0.9)),
    *_many(_tied, target=(0.885, 0.87, 0.9, 0.85)),
    *_many(_coarse, target=(0.87, 0.9, 0.85)),
    *_many(replace(_tied, name="E exact top-p tied k64", block=64), target=(0.87, 0.9, 0.85)),
    *_many(_exact_p, target=(0.87, 0.9, 0.85, 0.8)),
    *_many(_exact, target=(0.87, 0.9, 0.85)),
    *_many(replace(_exact_p, name="E exact top-p k64", block=64), target=(0.87, 0.9, 0.85)),
    *_many(_kept, target=(0.87, 0.9, 0.85, 0.8)),
    replace(_exact_p, name="E exact top-p corrected target 0.87", correct=128, target=0.87),
    replace(_exact_p, name="E exact top-p 8 rows target 0.87", rows=8, target=0.87),
    replace(_exact_p, name="E exact top-p q 128 target 0.87", pool_q=128, target=0.87),
    replace(_exact_p, name="E exact top-p q 32 target 0.87", pool_q=32, target=0.87),
    replace(_exact_p, name="E exact top-p value target 0.87", value=True, target=0.87),
    replace(_exact_p, name="E exact top-p norm head target 0.87", norm="head", target=0.87),
    replace(_exact_p, name="E exact top-p shared target 0.87", share=True, target=0.87),
    replace(_exact, name="mass exact", measure="mass", norm="head"),
    replace(_exact_p, name="mass exact top-p", measure="mass", norm="head"),
    # correction at lower targets
    *_many(_both, target=(0.8, 0.7, 0.9, 0.6)),
    *_many(_fixed, target=(0.8, 0.7)),
    *_many(_error, target=(0.8, 0.7, 0.6, 0.9)),
    *_many(_layer, target=(0.8, 0.7, 0.9)),
    # smaller key blocks
    *_many(_small, target=(0.9, 0.8)),
    *_many(replace(_both, name="corrected 2nd, k64", block=64), target=(0.8, 0.7)),
    replace(_both, name="corrected 2nd, sub 32 target 0.7", correct=32, target=0.7),
    replace(_both, name="corrected 2nd, sub 64 target 0.7", correct=64, target=0.7),
    # what the audit asks
    *_many(_error_plain, target=(0.8, 0.7)),
    *_many(_common, target=(0.8, 0.7)),
    *_many(replace(_mass, name="segments", scope="segment", grid=FINE), target=(0.9, 0.8)),
    replace(_error, name="error 2nd, segments target 0.7", scope="segment", target=0.7),
    *_many(replace(_mass, name="fine grid", grid=FINE), target=(0.9,)),
    # thresholds and estimates
    *_many(replace(_mass, name="top-p", rule="top-p", grid=LEFT_OUT, lines=4.0, fixed_lines=True),
           target=(0.9, 0.8)),
    replace(_mass, name="two sub-means", pool_k=64),
    replace(_mass, name="key spread", spread=True),
    replace(_mass, name="queries of 64", pool_q=64),
    replace(_mass, name="queries of 32, max", pool_q=32, over_q="max"),
    replace(_mass, name="value", value=True, grid=FINE),
    replace(_mass, name="no lines", lines=0.0),
    replace(_mass, name="mean .9 min .8", least=0.8),
    replace(_mass, name="8 rows", rows=8),
    replace(_mass, name="shared per KV head", share=True),
    # combinations
    replace(_error, name="error 2nd, k64, sub 64 target 0.7", block=64, correct=64, target=0.7),
    replace(_error, name="error 2nd, value target 0.7", value=True, target=0.7),
    replace(_error, name="error 2nd, spread, q 64 target 0.7", spread=True, pool_q=64, target=0.7),
]  # fmt: skip
