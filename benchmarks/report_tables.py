"""The tables of README and docs/measurements.md, and docs/attention-h200.png, made from
benchmarks/results/*.jsonl.

    python benchmarks/report_tables.py            write the tables between the markers
    python benchmarks/report_tables.py --check    fail if one of the files says anything else
    python benchmarks/report_tables.py --plot     draw the picture too (needs matplotlib)

A marker is a pair of lines `<!-- NAME:begin -->` and `<!-- NAME:end -->`, NAME one of attention
(structured inputs, 32/8 heads of D 128), ratios (the same in short), shapes (the other heads),
captured (real q, k), break-even, short and prefill. Of rows about the same thing the last one
counts, files in the order of their names (machine, date, subject).
"""

import argparse
import json
import re
import sys
from pathlib import Path

from cases import spelled
from targets import fastest, shortest_win, total_of

ROOT = Path(__file__).resolve().parent.parent
RESULTS, README = ROOT / "benchmarks" / "results", ROOT / "README.md"
DOCUMENTS = (README, ROOT / "docs" / "measurements.md")
PICTURE = ROOT / "docs" / "attention-h200.png"
MAIN_HEADS = "llama-3.1-8b"
DENSE = {
    "sdpa_cudnn": "cuDNN", "sdpa_flash": "flash", "fa4": "FA4", "flex_fa4": "flex FA4",
    "flex_triton": "flex Triton",
}  # fmt: skip
# What makes two rows be about the same thing.
SAME = (
    "row", "machine", "inputs", "model", "text", "layer", "share", "sharp_tokens", "heads",
    "length", "policy", "preset", "kernel", "backend", "step", "layers", "min_seqlen", "one_model",
)  # fmt: skip


def read_rows(folder=RESULTS):
    """All rows, without those that a later one replaces; `inputs` filled in for the oldest."""
    rows = {}
    for file in sorted(Path(folder).glob("*.jsonl")):
        for line in file.read_text().splitlines():
            row = json.loads(line)
            if row.get("row") == "attention":
                row = {"inputs": "columns", "preset": "balanced", **row}
            rows[tuple(str(row.get(name)) for name in SAME)] = row
    return list(rows.values())


def number(x):
    """Milliseconds or a ratio with three digits; a dash where there is none."""
    if x is None:
        return "–"  # noqa: RUF001  a dash of a table
    return f"{x:.0f}" if x >= 100 else f"{x:#.3g}" if x >= 1 else f"{x:.2f}"


def table(head, lines):
    """A Markdown table."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def attention_table(rows, names):
    """Rows of bench_attention.py; names: {column title: a function of a row} to begin with."""
    paths = [path for path in DENSE if any(row.get(f"{path}_ms") for row in rows)]
    head = [
        *names, "kernel", "blocks kept", "mass kept", "selection", "attention", "both",
        *(f"dense: {DENSE[path]}" for path in paths), "SDPA / ours", "best dense / ours",
    ]  # fmt: skip
    lines = []
    for row in rows:
        total = total_of(row)
        ratios = [best and best[1] / total for best in (fastest(row, ("sdpa",)), fastest(row))]
        if "fa4" in paths and not row.get("fa4_ms"):
            ratios[1] = None  # the fastest of all may be one that was not timed
        lines.append([
            *(name(row) for name in names.values()), row["kernel"], f"{row['density']:.1%}",
            f"{row['coverage']:.3f}".lstrip("0"), number(row["route_ms"]),
            number(row["sparse_ms"]), number(total),
            *(number(row.get(f"{path}_ms")) for path in paths), *(number(x) for x in ratios),
        ])  # fmt: skip
    return table(head, lines)


def shape_of(row):
    """ "32/8 D 128", or the name where an older row has no shape."""
    return row.get("shape") or row["heads"]


def by_length(rows):
    """In the order of a table: heads, then length, then kernel."""
    return sorted(rows, key=lambda row: (shape_of(row), row["length"], row.get("kernel", "")))


def of_heads(rows, *, main=True):
    """The main heads, or all others, on structured inputs; on the simple ones for want of those."""
    found = [row for row in rows if row.get("row") == "attention" and row["policy"] == "hybrid"]
    found = [row for row in found if (row["heads"] == MAIN_HEADS) == main]
    structured = [row for row in found if row["inputs"] == "structured"]
    return by_length(structured or [row for row in found if row["inputs"] == "columns"])


def ratios(rows):
    """The main heads in short: what was kept, and both times behind each ratio."""
    lines = []
    for row in of_heads(rows):
        total = total_of(row)
        sdpa, best = fastest(row, ("sdpa",)), fastest(row)
        if not row.get("fa4_ms"):
            best = None  # the fastest of all may be one that was not timed
        pairs = [(x and x[1], x and x[1] / total) for x in (sdpa, best)]
        lines.append([
            spelled(row["length"]), row["kernel"], f"{row['density']:.1%}",
            f"{row['coverage']:.3f}".lstrip("0"), number(total),
            *(number(x) for pair in pairs for x in pair),
        ])  # fmt: skip
    head = [
        "length", "kernel", "blocks kept", "mass kept", "crisp_flex, ms", "fastest dense SDPA, ms",
        "ratio", "fastest dense of all, ms", "ratio",
    ]  # fmt: skip
    return lines and table(head, lines)


def attention(rows, *, main=True):
    """Every timed path of `of_heads`."""
    found = of_heads(rows, main=main)
    names = {} if main else {"heads": shape_of}
    return found and attention_table(found, {**names, "length": lambda r: spelled(r["length"])})


def captured(rows):
    """Real q, k, with the total against density x the fastest dense SDPA."""
    found = [row for row in rows if row.get("inputs") == "captured" and row["row"] == "attention"]
    names = {
        "model, layer": lambda r: f"{r['model']}, {r['layer']}",
        "heads": shape_of,
        "length": lambda r: spelled(r["length"]) + (" *" if r.get("note") else ""),
        "of the floor": lambda r: f"{total_of(r) / r['density'] / fastest(r, ('sdpa',))[1]:.2f}",
    }
    text = found and attention_table(by_length(found), names)
    notes = sorted({row["note"] for row in found if row.get("note")})
    return text + "".join(f"\n\n\\* {note}" for note in notes) if found else text


def break_even(rows):
    """From which length on sparse wins, per heads and inputs."""
    cases = {}
    for row in rows:
        if row.get("row") == "break-even":
            key = (row["heads"], row.get("model") or row["inputs"], row["backend"])
            cases.setdefault(key, []).append(row)
    lines = []
    for key, group in sorted(cases.items()):
        wins = [shortest_win(group, suffix) for suffix in ("_ms", "_launched_ms")]
        lines.append([*key, *(spelled(win) if win else "–" for win in wins)])  # noqa: RUF001
    return lines and table(["heads", "inputs", "backend", "as a CUDA graph", "as called"], lines)


def whole_model(rows, kind):
    """Rows of bench_prefill.py: "prefill" or "short"."""
    lines = [
        [
            "one decode step after" if row["step"] == "decode" else "prompt",
            spelled(row["length"]), str(row["layers"]), number(row["plain_ms"]),
            number(row["crisp_flex_ms"]), f"{row['ratio']:.2f}",
            "dense" if row["density"] is None else f"{row['density']:.1%}",
        ]
        for row in sorted(rows, key=lambda r: (r.get("step", ""), r.get("length", 0)))
        if row.get("row") == kind
    ]  # fmt: skip
    lines.sort(key=lambda line: line[0] != "prompt")
    head = ["step", "length", "layers", "torch.compile", "crisp_flex", "ratio", "blocks kept"]
    return lines and table(head, lines)


SECTIONS = {
    "ratios": ratios,
    "attention": attention,
    "shapes": lambda rows: attention(rows, main=False),
    "captured": captured,
    "break-even": break_even,
    "short": lambda rows: whole_model(rows, "short"),
    "prefill": lambda rows: whole_model(rows, "prefill"),
}


def filled(text, rows):
    """The text of a document with the tables between its markers.

    Raises:
        SystemExit: A marker has no partner, names no section, or there are no rows for it.
    """
    names = re.findall(r"<!-- ([\w-]+):begin -->", text)
    for name in names:
        if name not in SECTIONS:
            raise SystemExit(f"no section {name!r}; there are {', '.join(SECTIONS)}")
        block = rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)"
        if len(re.findall(block, text, re.DOTALL)) != 1:
            raise SystemExit(f"the markers of {name!r} are no pair")
        made = SECTIONS[name](rows)
        if not made:
            raise SystemExit(f"no rows for {name!r} in {RESULTS}")
        body = f"{made}\n"
        text = re.sub(block, lambda m, body=body: m[1] + body + m[2], text, flags=re.DOTALL)
    return text


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing; fail where stale")
    parser.add_argument("--plot", action="store_true", help="draw docs/attention-h200.png")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--documents", type=Path, nargs="+", default=DOCUMENTS)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    args = parser.parse_args()
    rows = read_rows(args.results)
    old = {file: file.read_text(encoding="utf-8") for file in args.documents}
    new = {file: filled(text, rows) for file, text in old.items()}
    if args.plot:
        from attention_plot import draw

        draw(rows, args.picture)
    if args.check:
        stale = [file.name for file in old if new[file] != old[file]]
        if stale:
            sys.exit(f"stale: {', '.join(stale)}; run python benchmarks/report_tables.py")
        return
    for file, text in new.items():
        file.write_text(text, encoding="utf-8")
    unused = [name for name in SECTIONS if f"<!-- {name}:begin -->" not in "".join(new.values())]
    print(f"{', '.join(map(str, new))} written; no markers for: {', '.join(unused) or 'none'}")


if __name__ == "__main__":
    main()
