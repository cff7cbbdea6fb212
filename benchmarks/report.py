"""One HTML file, without any network reference, from the rows of quality.py and noise_growth.py.

    python benchmarks/report.py RESULTS.jsonl ... [--out report.html] [--png docs/]

It holds the paper's four claims with a verdict and the number behind it, the density-quality
frontier (mean and standard error over windows, the texts apart), retrieval over depth and length
with 95 % intervals and as heat maps, density, c_struct and root JSD of every layer and head, the
routing agreement, and the blocks that selections keep as the context grows. --png also writes its
pictures as quality-NAME.png, for README.
"""

import argparse
import json
import re
from pathlib import Path

import report_frontier
import report_maps
import report_noise
from report_claims import claims
from report_html import document, heading, image, paragraph, png, table

KINDS = ("text", "task", "routing", "noise")


def read_rows(paths):
    """The rows of all files, of the kinds that the page shows."""
    rows = [json.loads(s) for p in paths for s in Path(p).read_text().splitlines() if s]
    return [r for r in rows if r["row"] in KINDS]


def pictures(rows):
    """{name: PNG bytes} of all figures that the rows allow."""
    figures = {
        **report_frontier.figures(rows), **report_maps.needle_figures(rows),
        **report_maps.density_figures(rows), **report_maps.routing_figures(rows),
        **report_noise.noise_figures(rows),
    }  # fmt: skip
    return {name: png(figure) for name, figure in figures.items()}


def page(rows, drawn=None):
    """The HTML text.

    Args:
        rows: Of read_rows.
        drawn: What `pictures` gave for them; None draws.
    """
    drawn = pictures(rows) if drawn is None else drawn

    def shown(kind):
        return [image(data, name) for name, data in drawn.items() if name.split()[0] == kind]

    judged = [(c.name, c.verdict, c.measured, c.paper, c.rule) for c in claims(rows)]
    head = ("claim", "verdict", "measured here", "paper", "rule")
    parts = [heading("The paper's claims"), table(head, judged, text=True), *_sources(rows)]
    sections = (
        ("Density and quality", "frontier", report_frontier.tables(rows)),
        ("Retrieval over depth and length", "needle", report_maps.retrieval_tables(rows)),
        ("Density by layer and head", "density", []),
        ("Routing", "routing", [report_maps.agreement_table(rows)]),
        ("Kept blocks as the context grows", "noise", [report_noise.noise_table(rows)]),
    )
    for title, kind, tables in sections:
        if shown(kind):
            parts += [heading(title), *shown(kind), *tables]
    return document("crisp_flex: selections and quality", parts)


def _sources(rows):
    names = ("machine", "torch", "triton", "commit", "date")
    found = {tuple(str(r[n]) for n in names) for r in rows if all(n in r for n in names)}
    return [
        paragraph(f"Measured on {machine}, torch {torch}, triton {triton}, {commit}, {date}.")
        for machine, torch, triton, commit, date in sorted(found)
    ]


def file_name(name):
    """The PNG's file name of a picture."""
    return f"quality-{re.sub(r'[^a-z0-9.]+', '-', name.lower()).strip('-')}.png"


def main():
    """Write the page, and the pictures if asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("results", nargs="+", type=Path, help="JSONL files")
    parser.add_argument("--out", type=Path, default=Path("report.html"))
    parser.add_argument("--png", type=Path, metavar="FOLDER", help="write the pictures there too")
    args = parser.parse_args()
    rows = read_rows(args.results)
    drawn = pictures(rows)
    args.out.write_text(page(rows, drawn), encoding="utf-8")
    print(args.out)
    if args.png:
        args.png.mkdir(parents=True, exist_ok=True)
        for name, data in drawn.items():
            (args.png / file_name(name)).write_bytes(data)
            print(args.png / file_name(name))


if __name__ == "__main__":
    main()
