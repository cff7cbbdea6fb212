"""The picture of the attention rows: times over length, and how many times faster than dense."""

from cases import spelled
from targets import fastest, total_of

MAIN_HEADS = "llama-3.1-8b"
LINES = {
    "sdpa_cudnn_ms": ("dense, SDPA cuDNN", "#444444", "s"),
    "sdpa_flash_ms": ("dense, SDPA flash", "#999999", "v"),
    "fa4_ms": ("dense, FA4", "#7a5195", "D"),
}
KERNELS = {"FLASH": "#d1495b", "TRITON": "#00798c"}


def draw(rows, path):
    """Save the picture of the main heads' rows on structured inputs (or, without, the simple ones).

    Raises:
        SystemExit: There are no such rows.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = [
        row for row in rows
        if row.get("row") == "attention" and row["heads"] == MAIN_HEADS
        and row["policy"] == "hybrid"
    ]  # fmt: skip
    found = [r for r in found if r["inputs"] == "structured"] or [
        r for r in found if r["inputs"] == "columns"
    ]
    if not found:
        raise SystemExit(f"no attention rows of {MAIN_HEADS} to draw")
    found.sort(key=lambda row: (row["length"], -row["density"]))
    figure, (times, ratios) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for column, (label, colour, mark) in LINES.items():
        # one figure a length: dense does not depend on the kernel of the row
        points = {row["length"]: row[column] for row in found if row.get(column)}
        if points:
            times.plot(*zip(*points.items(), strict=True), mark + "-", color=colour, label=label)
    for kernel, colour in KERNELS.items():
        # the last row of a length, the one with the fewest blocks where there are several
        own = list({row["length"]: row for row in found if row["kernel"] == kernel}.values())
        if not own:
            continue
        lengths = [row["length"] for row in own]
        label = f"crisp_flex, {kernel}"
        times.plot(lengths, [total_of(r) for r in own], "o-", color=colour, label=label)
        times.plot(lengths, [r["route_ms"] for r in own], "o:", color=colour, alpha=0.5,
                   label=f"of that, selection ({kernel})")  # fmt: skip
        gains = [fastest(r, ("sdpa",))[1] / total_of(r) for r in own]
        ratios.plot(lengths, gains, "o-", color=colour, label=label)
        if kernel == next(k for k in KERNELS if any(r["kernel"] == k for r in found)):
            for row, gain in zip(own, gains, strict=True):
                ratios.annotate(
                    f"{row['density']:.0%} kept", (row["length"], gain), color=colour,
                    xytext=(0, 8), textcoords="offset points", ha="center", fontsize=8,
                )  # fmt: skip
    ratios.axhline(1, color="#444444", linewidth=0.8)
    times.set_ylabel("milliseconds")
    ratios.set_ylabel("fastest dense SDPA / selection and attention")
    for axes in (times, ratios):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        ticks = sorted({row["length"] for row in found})
        axes.set_xticks(ticks, [spelled(tick) for tick in ticks])
        axes.set_xlabel("tokens")
        axes.margins(x=0.1)
        axes.grid(alpha=0.25)
        axes.legend(fontsize=8)
    low = min(0.5, *ratios.get_ylim())
    ratios.set_ylim(low, ratios.get_ylim()[1] * 1.4)
    steps = [step for step in (0.5, 1, 2, 4, 8, 16, 32, 64) if step <= ratios.get_ylim()[1]]
    ratios.set_yticks(steps, [f"{step:g}x" for step in steps])
    ratios.minorticks_off()
    figure.suptitle(f"One attention layer, 32/8 heads, D 128, bf16, {found[0]['machine']}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
