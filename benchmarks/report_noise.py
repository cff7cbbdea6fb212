"""The rows of noise_growth.py as a table and a picture."""

from report_html import grid, table


def noise_rows(rows):
    """Those of the experiment."""
    return [r for r in rows if r["row"] == "noise"]


def noise_table(rows):
    """HTML: kept blocks at the shortest and the longest context, and the exponent."""
    body = [
        (
            r["selection"], r["structure"], r["spread"], f"{r['kept'][0]:.0f}",
            f"{r['kept'][-1]:.0f} of {r['blocks'][-1]}", f"{r['mass_kept'][-1]:.3f}",
            f"{r['exponent']:.2f}",
        )
        for r in noise_rows(rows)
    ]  # fmt: skip
    head = (
        "selection", "structure", "spread", "blocks at 4k", "blocks at 512k", "mass at 512k",
        "exponent of n",
    )  # fmt: skip
    return table(head, body)


def noise_figures(rows):
    """{name: figure}: kept blocks over tokens, a panel for each structure and spread."""
    panels = {}
    for r in noise_rows(rows):
        panels.setdefault((r["structure"], r["spread"]), []).append(r)
    if not panels:
        return {}
    figure, axes = grid(len(panels), 2, size=(4.5, 2.8))
    for ax, ((structure, spread), rs) in zip(axes, panels.items(), strict=True):
        for r in rs:
            ax.plot(r["tokens"], r["kept"], "o-", markersize=3, label=r["selection"])
        ax.plot(rs[0]["tokens"], rs[0]["blocks"], ":", color="0.6", label="all blocks")
        ax.set(xscale="log", yscale="log", xlabel="tokens", ylabel="kept blocks of the row")
        ax.set_ylim(5, 2 * max(rs[0]["blocks"]))
        ax.set_title(f"{structure:.0%} of the mass in 10 blocks, spread {spread:g}", fontsize=9)
    axes[0].legend(fontsize=7)
    return {"noise": figure}
