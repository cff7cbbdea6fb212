"""The density-quality frontier of quality.py's rows of text, as a table and a picture a model."""

import math
import statistics
from collections import defaultdict

from report_html import grid, heading, table

MEASURES = ("density", "recall", "kl", "top1", "loss_difference")


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
    result = {}
    for column, policies in groups.items():
        lines = [
            (name, len(rs), {m: mean_error([r[m] for r in rs]) for m in MEASURES})
            for name, rs in policies.items()
        ]
        result[column] = sorted(lines, key=lambda line: line[2]["density"][0])
    return result


def best(lines):
    """Policies that no other one beats in density and KL; lines as a value of frontier's."""
    points = {name: (m["density"][0], m["kl"][0]) for name, _, m in lines}
    return [
        name
        for name, (density, kl) in points.items()
        if not any(d <= density and k <= kl and (d, k) != (density, kl) for d, k in points.values())
    ]


def said(column):
    """A column in words."""
    model, length, text, last = column
    return f"{model}, {length} tokens, {text}" + (f", dense last blocks: {last}" if last else "")


def tables(rows):
    """HTML: a table a column; policies on the frontier are marked."""
    parts = []
    for column, lines in frontier(rows).items():
        ahead = set(best(lines))
        body = [
            ("★ " * (name in ahead) + name, n, *(_spelled(*m[x]) for x in MEASURES))
            for name, n, m in lines
        ]
        parts += [heading(said(column), 3), table(("policy", "windows", *MEASURES), body)]
    return parts


def _spelled(mean, error):
    return f"{mean:.4f}" if math.isnan(error) else f"{mean:.4f} ± {error:.4f}"


def figures(rows):
    """{name: figure}: one a model, a panel for each length and text."""
    columns = defaultdict(dict)
    for column, lines in frontier(rows).items():
        columns[column[0]][column] = lines
    result = {}
    for model, panels in columns.items():
        figure, axes = grid(len(panels), 2, size=(6, 4))
        for ax, (column, lines) in zip(axes, panels.items(), strict=True):
            _panel(ax, column, lines)
        result[f"frontier {model}"] = figure
    return result


def _panel(ax, column, lines):
    # dense has KL 0, which has no logarithm
    points = {name: (m["density"][0], max(m["kl"][0], 1e-6)) for name, _, m in lines}
    ahead = sorted(points[name] for name in best(lines))
    ax.plot(*zip(*ahead, strict=True), "-", color="0.7", zorder=0)
    for name, (density, kl) in points.items():
        ax.plot(density, kl, "o", markersize=4)
        ax.annotate(name, (density, kl), fontsize=6, xytext=(3, 3), textcoords="offset points")
    ax.margins(x=0.15, y=0.1)
    ax.set(xlabel="kept / visible blocks", ylabel="KL(dense || sparse), nats", yscale="log")
    ax.set_title(said(column), fontsize=9)
