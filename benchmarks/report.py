"""One HTML file, without any network reference, from the rows of quality.py.

    python benchmarks/report.py RESULTS.jsonl ... --out report.html

It shows the density-quality frontier as a plot and a table (mean and standard error over windows,
the texts apart), and retrieval over depth and length, with the 95 % interval of each policy.
"""

import argparse
import base64
import html
import io
import json
import math
import statistics
from collections import defaultdict
from pathlib import Path


def read_rows(paths):
    """The rows of all files."""
    return [json.loads(s) for p in paths for s in Path(p).read_text().splitlines() if s]


def mean_error(values):
    """Mean and standard error of the mean; the error of one value is NaN."""
    if len(values) < 2:
        return values[0], math.nan
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def frontier(rows):
    """{(model, length, text, dense_last_blocks): [(policy, n, {measure: (mean, error)})]}.

    Policies stand in the order of their density.
    """
    groups = defaultdict(lambda: defaultdict(list))
    for r in rows:
        if r["row"] == "text":
            column = (r["model"], r["length"], r["text"], r["dense_last_blocks"])
            groups[column][r["policy"]].append(r)
    measures = ("density", "recall", "kl", "top1", "loss_difference")
    table = {}
    for column, policies in groups.items():
        lines = [
            (name, len(rs), {m: mean_error([r[m] for r in rs]) for m in measures})
            for name, rs in policies.items()
        ]
        table[column] = sorted(lines, key=lambda line: line[2]["density"][0])
    return table


def retrieval(rows):
    """{(model, policy, task): {(length, depth): (score, low, high, samples)}}."""
    maps = defaultdict(dict)
    for r in rows:
        if r["row"] == "task":
            cell = (r["score"], *r["wilson"], r["samples"])
            maps[r["model"], r["policy"], r["task"]][r["length"], r["depth"]] = cell
    return dict(maps)


def _image(figure):
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=110)
    return f'<img src="data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}">'


def _plot(title, lines):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for name, _, m in lines:
        axes.plot(m["density"][0], max(m["kl"][0], 1e-7), "o")
        axes.annotate(name, (m["density"][0], max(m["kl"][0], 1e-7)), fontsize=7)
    axes.set(title=title, xlabel="kept / visible blocks", ylabel="KL(dense || sparse), nats")
    axes.set_yscale("log")
    return _image(figure)


def _table(head, lines):
    cells = "".join(f"<th>{html.escape(h)}</th>" for h in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(c))}</td>" for c in line) + "</tr>"
        for line in lines
    )
    return f"<table><tr>{cells}</tr>{body}</table>"


def page(rows):
    """The HTML text."""
    parts = ["<!doctype html><meta charset=utf-8><title>crisp_flex quality</title>"]
    parts.append("<style>body{font:14px sans-serif}td,th{padding:2px 8px;text-align:right}</style>")
    for (model, length, text, last), lines in frontier(rows).items():
        title = f"{model}, {length} tokens, {text}, dense last blocks: {last}"
        parts += [f"<h2>{html.escape(title)}</h2>", _plot(title, lines)]
        names = list(lines[0][2])
        body = [
            (name, n, *(f"{m[x][0]:.4f} ± {m[x][1]:.4f}" for x in names)) for name, n, m in lines
        ]
        parts.append(_table(("policy", "windows", *names), body))
    for (model, policy, task), cells in retrieval(rows).items():
        parts.append(f"<h3>{html.escape(f'{model}, {policy}: {task}')}</h3>")
        lengths, depths = (sorted({key[i] for key in cells}) for i in (0, 1))
        body = []
        for length in lengths:
            got = [cells.get((length, depth)) for depth in depths]
            said = [
                "" if c is None else f"{c[0]:.2f} [{c[1]:.2f}, {c[2]:.2f}], {c[3]}" for c in got
            ]
            body.append((length, *said))
        parts.append(_table(("tokens", *(f"depth {d}" for d in depths)), body))
    return "\n".join(parts)


def main():
    """Write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("results", nargs="+", type=Path, help="JSONL files of quality.py")
    parser.add_argument("--out", type=Path, default=Path("report.html"))
    args = parser.parse_args()
    args.out.write_text(page(read_rows(args.results)), encoding="utf-8")
    print(args.out)


if __name__ == "__main__":
    main()
