"""Maps of quality.py's rows: retrieval over depth and length; density and routing by head.

Density and routing are shown at the longest length of a model, density of the first window.
"""

from collections import defaultdict

from report_html import grid, heading, table


def retrieval(rows):
    """{(model, policy, task): {(length, depth): (score, low, high, samples)}}."""
    maps = defaultdict(dict)
    for r in rows:
        if r["row"] == "task":
            cell = (r["score"], *r["wilson"], r["samples"])
            last = r.get("dense_last_blocks")
            policy = r["policy"] + (f", dense last blocks: {last}" if last else "")
            maps[r["model"], policy, r["task"]][r["length"], r["depth"]] = cell
    return dict(maps)


def retrieval_tables(rows):
    """HTML: a table a model, policy and task, with the 95 % intervals."""
    parts = []
    for (model, policy, task), cells in retrieval(rows).items():
        lengths, depths = _axes_of(cells)
        body = []
        for length in lengths:
            got = [cells.get((length, depth)) for depth in depths]
            said = [
                "" if c is None else f"{c[0]:.2f} [{c[1]:.2f}, {c[2]:.2f}], {c[3]}" for c in got
            ]
            body.append((length, *said))
        parts.append(heading(f"{model}, {policy}: {task}", 3))
        parts.append(table(("tokens", *(f"depth {d}" for d in depths)), body))
    return parts


def _axes_of(cells):
    return tuple(sorted({key[i] for key in cells}) for i in (0, 1))


def needle_matrix(cells):
    """[lengths][depths] scores of one value of retrieval's, NaN where nothing was measured."""
    lengths, depths = _axes_of(cells)
    return [[cells.get((n, d), (float("nan"),))[0] for d in depths] for n in lengths]


def needle_figures(rows):
    """{name: figure}: one a model, a panel for each policy (down) and task (across)."""
    by_model = defaultdict(dict)
    for (model, policy, task), cells in retrieval(rows).items():
        by_model[model][policy, task] = cells
    result = {}
    for model, panels in by_model.items():
        policies, tasks = (list(dict.fromkeys(key[i] for key in panels)) for i in (0, 1))
        figure, axes = grid(len(policies) * len(tasks), len(tasks), size=(2.6, 1.7))
        wanted = [(policy, task) for policy in policies for task in tasks]
        for ax, key in zip(axes, wanted, strict=True):
            if key not in panels:
                ax.set_axis_off()
                continue
            lengths, depths = _axes_of(panels[key])
            drawn = ax.imshow(
                needle_matrix(panels[key]), vmin=0, vmax=1, cmap="RdYlGn", aspect="auto"
            )
            ax.set_xticks(range(len(depths)), [f"{d:g}" for d in depths], fontsize=6)
            ax.set_yticks(range(len(lengths)), [f"{n / 1024:g}k" for n in lengths], fontsize=6)
            ax.set_title(f"{key[1]}\n{key[0]}", fontsize=7)
        _scale(figure, drawn, axes, "score; down: tokens, across: depth")
        result[f"needle {model}"] = figure
    return result


def longest(rows, kind):
    """{model: [rows of that kind, first window, at the longest length of the model]}."""
    groups = defaultdict(list)
    for r in rows:
        if r["row"] == kind and r["window"] == 0:
            groups[r["model"]].append(r)
    return {
        model: [r for r in rs if r["length"] == max(x["length"] for x in rs)]
        for model, rs in groups.items()
    }


def density_figures(rows):
    """{name: figure}: density of every layer and head, a panel for each policy and text."""
    result = {}
    for model, rs in longest(rows, "text").items():
        panels = [
            (f"{r['policy']}\n{r['text']}, {r['length']}", r["layers"], r["density_by_layer_head"])
            for r in rs
            if r.get("density_by_layer_head")
        ]
        if panels:
            result[f"density {model}"] = _heads(panels, "kept / visible blocks", "viridis")
    return result


def routing_figures(rows):
    """{name: figure}: c_struct and root JSD of every layer and head."""
    result = {}
    for model, rs in longest(rows, "routing").items():
        panels = [
            (f"{said}\n{r['text']}, {r['length']}", r["layers"], r[name])
            for r in rs
            for name, said in (("c_struct", "c_struct"), ("root_jsd", "root JSD"))
        ]
        result[f"routing {model}"] = _heads(panels, "c_struct and root JSD", "magma")
    return result


def _heads(panels, label, colours):
    figure, axes = grid(len(panels), 6, size=(2, 2.6))
    for ax, (title, layers, matrix) in zip(axes, panels, strict=True):
        drawn = ax.imshow(matrix, vmin=0, vmax=1, cmap=colours, aspect="auto")
        step = max(len(layers) // 6, 1)
        ax.set_yticks(range(0, len(layers), step), layers[::step], fontsize=6)
        ax.tick_params(axis="x", labelsize=6)
        ax.set_title(title, fontsize=7)
    _scale(figure, drawn, axes, f"{label}; down: layer, across: head")
    return figure


def _scale(figure, drawn, axes, label):
    figure.colorbar(drawn, ax=list(axes), location="bottom", aspect=50, pad=0.01, label=label)


def agreement_table(rows):
    """HTML: agreement of c_struct >= tau with root JSD >= .1, beside the paper's."""
    body = [
        (
            f"{r['model']}, {r['text']}", r["length"], f"{100 * r['agreement']:.1f} %",
            f"{100 * r['agreement_of_lines_only']:.1f} %",
        )
        for r in rows
        if r["row"] == "routing"
    ]  # fmt: skip
    body += [
        ("paper: Llama-3.1-8B", "", "94.0 %", ""), ("paper: Qwen2.5-7B", "", "88.1 %", ""),
    ]  # fmt: skip
    return table(("model and text", "tokens", "c_struct agrees with JSD", "lines for all"), body)
