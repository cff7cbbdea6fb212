"""Record.save_html: the tables and figures of a record in one file that needs no network."""

from __future__ import annotations

import base64
import html
import io
import os
from pathlib import Path
from typing import TYPE_CHECKING

from crisp_flex.errors import CrispFlexError
from crisp_flex.record_table import HEADS, cells, totals

if TYPE_CHECKING:
    from crisp_flex.record import Record

# Figures of later runs are left out: a file of a hundred prompts must still open.
_RUNS_DRAWN = 4
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:1100px;padding:0 1em;"
    "color:#1c2430}table{border-collapse:collapse;font-size:13px}th,td{padding:.25em .7em;"
    "text-align:left;border-bottom:1px solid #dbe4ee}th{position:sticky;top:0;background:#fff}"
    "img{max-width:100%}.scroll{overflow-x:auto}"
)


def save_html(record: Record, path: str | os.PathLike[str]) -> None:
    """Write the report; see Record.save_html."""
    record.of_run()  # says what to do where nothing was recorded
    runs = list(dict.fromkeys(row.run for row in record.rows))
    figures = []
    for run in runs[:_RUNS_DRAWN]:
        image = io.BytesIO()
        record.plot(run).savefig(image, format="png", dpi=110)
        data = base64.b64encode(image.getvalue()).decode()
        figures.append(f'<img alt="run {run}" src="data:image/png;base64,{data}">')
    left_out = len(runs) - len(figures)
    note = f"<p>{left_out} more runs are in the table only.</p>" if left_out else ""
    head = "".join(f"<th>{name}</th>" for name in HEADS)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells(row)) + "</tr>"
        for row in record.rows
    )
    text = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>crisp_flex record</title><style>{_STYLE}</style></head><body>"
        f"<h1>What sparse attention kept</h1><p>{html.escape(totals(record))}.</p>{_LEGEND}"
        f'{"".join(figures)}{note}<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div></body></html>\n"
    )
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise CrispFlexError(
            f"cannot write {path} ({error.strerror}): choose another file"
        ) from error


_LEGEND = (
    "<p><b>kept</b>: blocks kept of those a causal mask shows. <b>c_struct</b>: mass of the first "
    "and last keys. <b>uncovered</b>: largest share of the attention mass that a head leaves out "
    "on the rows that selection measured. <b>mass</b>: the true mass kept on the audited query "
    "blocks, mean (record(audit=k)). <b>dense</b>: heads that keep all blocks. <b>over</b>: heads "
    "above max_uncovered.</p>"
)
