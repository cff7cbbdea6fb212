"""Tables and pictures as parts of one HTML file that needs no network."""

import base64
import html
import io
import math

STYLE = (
    "body{font:14px sans-serif;margin:2em;max-width:80em}td,th{padding:2px 8px;text-align:right}"
    "td:first-child,th:first-child,table.text td{text-align:left}table.text td{max-width:30em}"
    "img{max-width:100%}"
)


def document(title, parts):
    """The text of a page of `parts`, which are HTML."""
    head = f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title>"
    return "\n".join((head, f"<style>{STYLE}</style>", f"<h1>{html.escape(title)}</h1>", *parts))


def heading(text, level=2):
    """A heading."""
    return f"<h{level}>{html.escape(text)}</h{level}>"


def paragraph(text):
    """A paragraph of plain text."""
    return f"<p>{html.escape(text)}</p>"


def table(head, lines, *, text=False):
    """A table of plain values; text: its cells are sentences."""
    cells = "".join(f"<th>{html.escape(str(h))}</th>" for h in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(c))}</td>" for c in line) + "</tr>"
        for line in lines
    )
    return f"<table{' class=text' if text else ''}><tr>{cells}</tr>{body}</table>"


def png(figure):
    """The bytes of a Matplotlib figure as PNG."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=110)
    return data.getvalue()


def image(data, alt):
    """PNG bytes as a part of the page itself."""
    source = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return f'<img alt="{html.escape(alt)}" src="{source}">'


def grid(count, columns, *, size):
    """A figure and its `count` axes in rows of `columns`, each `size` inches (width, height)."""
    from matplotlib.figure import Figure

    columns = min(columns, count)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(size[0] * columns, size[1] * rows + 0.8), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for unused in axes[count:]:
        unused.set_axis_off()
    return figure, axes[:count]
