"""Rows of trial.py or layers.py as a table: at equal error, how many blocks against today's policy.

    python benchmarks/trials/frontier.py trial.jsonl [--base "mass target"]

A cell: density / KL (the error for layers.py) and the saving: 1 - cost over the density that the
base curve needs for the same KL, from a line in log KL between its targets. Beyond the curve's ends
no saving is given. cost counts a pooled key as one key token.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from pathlib import Path


def needed(curve: list[tuple[float, float]], kl: float) -> float | None:
    """Density at which the curve of (density, kl) points reaches kl; None outside it."""
    points = sorted(curve)
    for (d0, k0), (d1, k1) in itertools.pairwise(points):
        if k1 <= kl <= k0 and k0 > k1:
            share = (math.log(k0) - math.log(kl)) / (math.log(k0) - math.log(k1))
            return d0 + share * (d1 - d0)
    return None


def read(path: Path) -> dict[str, dict[str, tuple[float, float, float]]]:
    """{variant: {column: (density, cost, kl)}}."""
    table: dict[str, dict[str, tuple[float, float, float]]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        column = f"{row.get('model', 'layers')} {row['text']} {row['length']}"
        layers = row.get("layers", {}).values()
        cost = row.get("cost") or sum(r["cost"] for r in layers) / len(layers)
        kl = row["kl"] if "kl" in row else row["error"]
        table.setdefault(row["variant"], {})[column] = (row["density"], cost, kl)
    return table


def main() -> None:
    """Print the table as markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("rows", type=Path)
    parser.add_argument("--base", default="mass target", help="variants of the base curve begin so")
    args = parser.parse_args()
    table = read(args.rows)
    columns = list(dict.fromkeys(c for row in table.values() for c in row))
    curves = {
        c: [(row[c][0], row[c][2]) for name, row in table.items()
            if name.startswith(args.base) and c in row]
        for c in columns
    }  # fmt: skip
    print("| selection |", " | ".join(columns), "|")
    print("|---" * (len(columns) + 1) + "|")
    for name, row in table.items():
        cells = []
        for c in columns:
            if c not in row:
                cells.append("-")
                continue
            density, cost, kl = row[c]
            base = needed(curves[c], kl)
            saving = "" if base is None else f" ({100 * (1 - cost / base):+.0f} %)"
            cells.append(f"{density:.3f} / {kl:.4f}{saving}")
        print(f"| {name} |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
