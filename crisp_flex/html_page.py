"""The page that HTML reports stand on: one file, no network, readable on light and dark screens."""

from __future__ import annotations

import html
import os
from pathlib import Path

from crisp_flex.errors import CrispFlexError

# Colours with an alpha and none for text: a notebook's own theme stays in charge.
TABLE_STYLE = (
    ".crisp-flex{overflow-x:auto}"
    ".crisp-flex table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums}"
    ".crisp-flex th,.crisp-flex td{padding:.3em .8em;text-align:left;vertical-align:top;"
    "border-bottom:1px solid #8893a34d}"
    ".crisp-flex th{white-space:nowrap}"
    ".crisp-flex .number{text-align:right}"
    ".crisp-flex .whole{white-space:nowrap}"
)
_PAGE_STYLE = (
    ":root{color-scheme:light dark}"
    "body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:1100px;padding:0 1.2em;"
    "color:light-dark(#1c2430,#dbe2ea);background:light-dark(#fff,#14181d)}"
    "h1{font-size:1.6em;margin:.2em 0}"
    "dl{display:grid;grid-template-columns:max-content 1fr;gap:.1em 1em;font-size:13px}"
    "dt{font-weight:600}dd{margin:0}"
    "figure{margin:1em 0;padding:.6em;background:#fff;border-radius:6px}"
    "figure img{display:block;max-width:100%;height:auto;margin:auto}"
    "footer{font-size:12px;opacity:.7;margin-top:1.5em}"
)


def table(
    heads: tuple[str, ...],
    rows: list[tuple[str, ...]],
    *,
    numbers: tuple[str, ...] = (),
    whole: tuple[str, ...] = (),
) -> str:
    """A table in a box that scrolls sideways where it is wider than the screen.

    Args:
        heads: The columns' names.
        rows: A text per column each.
        numbers: Columns that are aligned to the right.
        whole: Columns whose texts are not broken.
    """
    kinds = {**dict.fromkeys(numbers, "number"), **dict.fromkeys(whole, "whole")}
    classes = [f' class="{kinds[head]}"' if head in kinds else "" for head in heads]

    def line(tag: str, texts: tuple[str, ...]) -> str:
        cells = zip(classes, texts, strict=True)
        return f"<tr>{''.join(f'<{tag}{c}>{html.escape(text)}</{tag}>' for c, text in cells)}</tr>"

    return (
        f'<div class="crisp-flex"><style>{TABLE_STYLE}</style><table>'
        f"<thead>{line('th', heads)}</thead>"
        f"<tbody>{''.join(line('td', row) for row in rows)}</tbody></table></div>"
    )


def write_page(path: str | os.PathLike[str], title: str, body: str) -> None:
    """Write a page.

    Args:
        path: The file; one that is there is replaced.
        title: Its headline, plain text.
        body: HTML below the headline.

    Raises:
        CrispFlexError: The file cannot be written.
    """
    name = html.escape(title)
    text = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{name}</title><style>{_PAGE_STYLE}</style></head>"
        f"<body><h1>{name}</h1>{body}</body></html>\n"
    )
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise CrispFlexError(
            f"cannot write {path} ({error.strerror}): choose another file"
        ) from error
