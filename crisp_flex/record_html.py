"""Record.save_html: the tables and figures of a record in one file that needs no network."""

from __future__ import annotations

import base64
import datetime
import html
import io
import os
from typing import TYPE_CHECKING

import torch

from crisp_flex.html_page import table, write_page
from crisp_flex.record_table import HEADS, LEGEND, cells, totals

if TYPE_CHECKING:
    from crisp_flex.record import Record

# Figures of later runs are left out: a file of a hundred prompts must still open.
_RUNS_DRAWN = 4


def save_html(record: Record, path: str | os.PathLike[str]) -> None:
    """Write the report; see Record.save_html."""
    record.of_run()  # says what to do where nothing was recorded
    runs = list(dict.fromkeys(row.run for row in record.rows))
    figures = "".join(_figure(record, run) for run in runs[:_RUNS_DRAWN])
    left_out = len(runs) - _RUNS_DRAWN
    note = f"<p>{left_out} more runs are in the table only.</p>" if left_out > 0 else ""
    legend = "".join(f"<dt>{name}</dt><dd>{html.escape(text)}</dd>" for name, text in LEGEND)
    rows = [cells(row) for row in record.rows]
    text_columns = ("site", "routes")
    numbers = tuple(head for head in HEADS if head not in text_columns)
    write_page(
        path,
        "What sparse attention kept",
        f"<p>{html.escape(totals(record))}.</p>{figures}{note}<dl>{legend}</dl>"
        f"{table(HEADS, rows, numbers=numbers, whole=text_columns)}"
        f"<footer>{html.escape(_made_by())}</footer>",
    )


def _figure(record: Record, run: int) -> str:
    image = io.BytesIO()
    record.plot(run).savefig(image, format="png", dpi=110)
    data = base64.b64encode(image.getvalue()).decode()
    alt = "Block maps of some heads, blocks kept by call and head, attention mass kept by call"
    return f'<figure><img alt="{alt}" src="data:image/png;base64,{data}"></figure>'


def _made_by() -> str:
    from crisp_flex import __version__

    when = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    return f"crisp_flex {__version__}, torch {torch.__version__}, {when}"
