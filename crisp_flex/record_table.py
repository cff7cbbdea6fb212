"""Record.summary: a line a call, as a rich table where rich is installed, else as plain text."""

from __future__ import annotations

import importlib.util
import io
from typing import TYPE_CHECKING

from crisp_flex.record_row import SiteRecord

if TYPE_CHECKING:
    from crisp_flex.record import Record

HEADS = (
    "run",
    "site",
    "tokens",
    "kept",
    "c_struct",
    "uncovered",
    "mass",
    "routes",
    "dense",
    "over",
)
# What stands in a column, for those that do not say it themselves.
LEGEND = (
    ("tokens", "queries of the call, and keys where they are more"),
    ("kept", "blocks kept of those that a causal mask shows, mean over the heads"),
    (
        "c_struct",
        "attention mass of the first and last 128 keys, seen from the last 128 queries; mean over "
        "the heads",
    ),
    (
        "uncovered",
        "largest share of the attention mass that a head leaves out on the rows that selection "
        "measured",
    ),
    (
        "mass",
        "true share of the attention mass kept on the audited query blocks, mean; record(audit=k)",
    ),
    ("routes", "heads by what chose their blocks"),
    ("dense", "heads that keep all blocks"),
    ("over", "heads above max_uncovered"),
)


def cells(row: SiteRecord) -> tuple[str, ...]:
    """The texts of one line, in the order of HEADS."""
    routes = ", ".join(f"{count} {route}" for route, count in row.routes.items())
    c_struct = sum(row.c_struct) / max(len(row.c_struct), 1)
    mass = f"{sum(row.mass) / len(row.mass):.3f}" if row.mass else "-"
    return (
        str(row.run) if row.run >= 0 else "-",
        row.site,
        str(row.length) if row.length == row.keys else f"{row.length} of {row.keys}",
        f"{row.density:.1%}",
        f"{c_struct:.2f}" if c_struct >= 0 else "-",
        f"{row.uncovered:.3f}",
        mass,
        routes,
        str(row.heads_dense),
        str(row.violations),
    )


def totals(record: Record) -> str:
    """One line about all rows."""
    missed = f"; {record.missed} calls in CUDA graphs were not read" if record.missed else ""
    overflow = sum(row.overflow for row in record.rows)
    plural = "" if len(record.rows) == 1 else "s"
    wrong = f"; {overflow} ROWS OVERFLOW, please report this" if overflow else ""
    return (
        f"{len(record.rows)} sparse attention call{plural}, {record.density:.1%} of the visible "
        f"blocks kept, {record.violations} heads above max_uncovered{missed}{wrong}"
    )


def summary(record: Record) -> str:
    """The table and the totals as text; see HEADS for the columns."""
    if not record.rows:
        return record.why_empty()
    rows = [cells(row) for row in record.rows]
    if importlib.util.find_spec("rich") is not None:
        return _rich(rows) + totals(record)
    return plain(HEADS, rows) + "\n" + totals(record)


def plain(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Columns padded with blanks.

    Example:
        >>> print(plain(("site", "kept"), [("layers.0", "9.0%")]))
        site      kept
        layers.0  9.0%
    """
    widths = [max(len(line[i]) for line in (heads, *rows)) for i in range(len(heads))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (heads, *rows)
    )


def _rich(rows: list[tuple[str, ...]]) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for head in HEADS:
        table.add_column(head, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    text = io.StringIO()
    # wide enough for every column: a cut path says nothing
    widths = [max(map(len, column)) + 3 for column in zip(HEADS, *rows, strict=True)]
    Console(file=text, width=max(80, sum(widths) + 3)).print(table)
    return text.getvalue()
