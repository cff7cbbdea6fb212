"""Record.plot: density by layer and head, block maps of some heads, mass kept (matplotlib)."""

from __future__ import annotations

import math

import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from crisp_flex.record_row import SiteRecord

CALLS_SHOWN = 4
DARK, PALE, LINE = "#1b4f8a", "#dbe4ee", "#c2410c"


def plot(rows: list[SiteRecord], title: str = "") -> Figure:
    """A figure about the calls of one run.

    Above the maps of the heads whose lists were kept, for up to four of the calls; below them
    blocks kept by call and head, and the mass kept by call: what selection measured itself, and the
    audit where there is one.

    Args:
        rows: At least one, in the order of the layers.
        title: Headline; "" makes one.
    """
    last = len(rows) - 1
    picked = sorted({round(i * last / (CALLS_SHOWN - 1)) for i in range(CALLS_SHOWN)})
    shown = [index for index in picked if rows[index].masks]
    heads = max((len(rows[index].masks) for index in shown), default=0)
    figure = Figure(figsize=(2.9 * max(len(shown), 3), 3.0 * heads + 5.6), layout="constrained")
    figure.suptitle(title or _title(rows), x=0.01, ha="left", fontsize=11)
    if shown:
        shades = (DARK, "kept"), (PALE, "left out"), ("white", "in the future")
        figure.legend(
            handles=[Patch(facecolor=c, edgecolor="#8a9aac", label=text) for c, text in shades],
            loc="outside upper right",
            ncols=3,
            fontsize=8,
            frameon=False,
        )
    ratios = [3.0] * heads + [2.4, 2.2]
    grid = figure.add_gridspec(heads + 2, max(len(shown), 1), height_ratios=ratios)
    for column, index in enumerate(shown):
        row = rows[index]
        by_density = sorted(row.masks, key=lambda head: row.density_by_head[head])
        for line, head in enumerate(by_density):
            axes = figure.add_subplot(grid[line, column])
            draw_blocks(axes, row.masks[head])
            axes.set_title(
                f"{_short(row.site)}\nhead {head}: {row.density_by_head[head]:.1%} kept", fontsize=8
            )
            axes.set_xlabel(f"key block of {row.block_size[1]} tokens", fontsize=8)
            axes.set_ylabel(f"query block of {row.block_size[0]}", fontsize=8)
    _draw_heads(figure, figure.add_subplot(grid[heads, :]), rows)
    _draw_mass(figure.add_subplot(grid[heads + 1, :]), rows)
    return figure


def draw_blocks(axes: Axes, mask: Tensor) -> None:
    """Kept blocks dark, dropped ones pale, those in the future white.

    Args:
        axes: Where to draw.
        mask: [Nq, Nkv] bool, the last row and column at the same position.
    """
    Nq, Nkv = mask.shape
    visible = torch.ones(Nq, Nkv).tril(Nkv - Nq).bool()
    colours = ListedColormap(["white", PALE, DARK])
    shades = visible.int() + (mask & visible).int()
    axes.imshow(shades.numpy(), cmap=colours, vmin=0, vmax=2, interpolation="nearest")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(5, integer=True))
    axes.tick_params(labelsize=7)


def _draw_heads(figure: Figure, axes: Axes, rows: list[SiteRecord]) -> None:
    heads = max(len(row.density_by_head) for row in rows)
    table = torch.full((heads, len(rows)), torch.nan)
    for column, row in enumerate(rows):
        table[: len(row.density_by_head), column] = torch.tensor(row.density_by_head)
    image = axes.imshow(table.numpy(), aspect="auto", vmin=0, vmax=1, cmap="viridis")
    bar = figure.colorbar(image, ax=axes)
    bar.set_label("blocks kept / visible", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    _label_calls(axes)
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_ylabel("head", fontsize=8)
    axes.set_title("blocks kept by call and head", fontsize=9)


def _draw_mass(axes: Axes, rows: list[SiteRecord]) -> None:
    at = range(len(rows))
    measured = [sum(row.coverage) / max(len(row.coverage), 1) for row in rows]
    worst = [1 - row.uncovered for row in rows]
    axes.plot(at, measured, color=DARK, marker=".", label="rows that selection measured, mean")
    axes.plot(at, worst, color="#8a9aac", label="their worst head")
    audited = [i for i in at if rows[i].mass]
    least = [float(rows[i].mass_min or 0.0) for i in audited]
    if audited:
        means = [sum(rows[i].mass) / len(rows[i].mass) for i in audited]
        axes.plot(audited, means, color=LINE, marker=".", label="audited query blocks, mean")
        axes.plot(audited, least, color=LINE, linestyle=":", label="their worst head and block")
    # from a round number below all points, so that a hundredth can be seen
    lowest = max(0.0, math.floor(min(worst + least) * 10 - 0.2) / 10)
    axes.set_ylim(lowest, 1 + 0.03 * (1 - lowest))
    axes.set_xlim(-0.5, len(rows) - 0.5)
    axes.grid(axis="y", color=PALE)
    axes.tick_params(labelsize=7)
    _label_calls(axes)
    axes.set_ylabel("share", fontsize=8)
    axes.set_title(f"attention mass kept (axis from {lowest:.1f})", fontsize=9)
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=4, frameon=False)


def _label_calls(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    axes.tick_params(labelsize=7)
    axes.set_xlabel("attention call of the run, in its order", fontsize=8)


def _title(rows: list[SiteRecord]) -> str:
    first = rows[0]
    name = f"{first.model}, " if first.model else ""
    mean = sum(row.density for row in rows) / len(rows)
    return f"{name}{first.length} tokens, {first.policy}: {mean:.1%} of the blocks kept"


def _short(path: str) -> str:
    """The end of a module's path."""
    return path if len(path) <= 28 else "..." + path[-25:]
