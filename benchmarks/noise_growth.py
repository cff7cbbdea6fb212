"""How many blocks a selection keeps as the context grows, on maps of known structure: O(n) or not.

    python benchmarks/noise_growth.py [--out FILE.jsonl]

A map is one row of block masses over n tokens: the sink and the newest block, eight spikes at
random places, and a background over all blocks, log-normal around its mean. The structure (ends and
spikes) holds a share of the mass that does not change with n, so the background of one block falls
as 1/n. A selection that pays for mass must then keep a share of all blocks as soon as the structure
alone is not enough; one that compares with the mean need not, unless the background is uneven.

Selections: cumulative mass gamma .9 and .95, the paper's floor (alpha 1, at least 8), and our
audited floor of preset balanced, which takes the largest multiple that holds .9 of the row (else
all blocks). All are the package's own functions. Rows: kept blocks and, of them, background, as
means over DRAWS maps, and the exponent of kept ~ n^exponent by least squares of the logarithms.
"""

import argparse
import math

import torch
from timing import where, write_rows

from crisp_flex import CrispConfig
from crisp_flex.routing.lines import above_floor
from crisp_flex.routing.policies.hybrid import MULTIPLES
from crisp_flex.routing.top_mass import top_mass

BLOCK, SPIKES, DRAWS = 128, 8, 32
TOKENS = tuple(2**i for i in range(12, 20))
# Share of the mass in ends and spikes; standard deviation of the logarithm of background masses.
STRUCTURES, SPREADS = (0.97, 0.92, 0.8, 0.6), (0.25, 1.0)


def maps(tokens, *, structure, spread, draws=DRAWS, seed=0):
    """Row maps and where their structure is: [draws, N] fp32 that sums to 1, and bool.

    Args:
        tokens: A multiple of 128, at least 2048.
        structure: Mass of the ends (half of it) and the spikes (the other half), in (0, 1).
        spread: Standard deviation of the logarithm of a background block's mass.
        draws: Maps.
        seed: The same maps for the same arguments.
    """
    g, N = torch.Generator().manual_seed(seed), tokens // BLOCK
    background = (spread * torch.randn(draws, N, generator=g)).exp()
    inner = torch.rand(draws, N - 2, generator=g).argsort(-1)[:, :SPIKES] + 1
    special = torch.zeros(draws, N, dtype=torch.bool).scatter(-1, inner, True)
    special[:, 0] = special[:, -1] = True
    background = background.masked_fill(special, 0.0)
    mass = background * ((1 - structure) / background.sum(-1, keepdim=True))
    # spikes of unequal height, 1 : 2 : ... : 8
    heights = torch.arange(1.0, SPIKES + 1).expand(draws, -1)
    mass = mass.scatter(-1, inner, structure / 2 * heights / heights.sum(-1, keepdim=True))
    mass[:, 0] = mass[:, -1] = structure / 4
    return mass, special


def cumulative(mass, gamma):
    """[draws, N] bool: the largest blocks until they hold gamma."""
    return top_mass(mass, gamma)


def _floor(mass, multiple, *, k_min):
    ends = torch.zeros(mass.shape[-1], dtype=torch.bool)
    ends[0] = ends[-1] = True
    return above_floor(mass, ends, torch.ones_like(ends), multiple, k_min=k_min)


def paper_floor(mass):
    """[draws, N] bool: CRISP's floor, alpha 1 and k_min 8."""
    config = CrispConfig(policy="crisp")
    return _floor(mass, config.alpha, k_min=config.k_min)


def audited_floor(mass, coverage):
    """[draws, N] bool: the floor at the largest multiple that holds `coverage`, else all."""
    kept = torch.ones_like(mass, dtype=torch.bool)
    for multiple in MULTIPLES:  # from the smallest
        tried = _floor(mass, multiple, k_min=0)
        held = (mass * tried).sum(-1, keepdim=True)
        kept = torch.where(held >= coverage + 1e-4, tried, kept)
    return kept


SELECTIONS = {
    "cumulative .9": lambda mass: cumulative(mass, 0.9),
    "cumulative .95": lambda mass: cumulative(mass, 0.95),
    "floor alpha 1": paper_floor,
    "audited .9": lambda mass: audited_floor(mass, CrispConfig().coverage),
}


def exponent(tokens, kept):
    """e of kept ~ tokens^e, by least squares of the logarithms."""
    x, y = ([math.log(v) for v in values] for values in (tokens, kept))
    mx, my = sum(x) / len(x), sum(y) / len(y)
    products = sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True))
    return products / sum((a - mx) ** 2 for a in x)


def experiment(*, tokens=TOKENS, structures=STRUCTURES, spreads=SPREADS, draws=DRAWS):
    """The rows: one a selection, structure and spread, with lists over tokens."""
    rows = []
    for structure in structures:
        for spread in spreads:
            drawn = [maps(n, structure=structure, spread=spread, draws=draws) for n in tokens]
            for name, select in SELECTIONS.items():
                kept, noise, held = [], [], []
                for mass, special in drawn:
                    chosen = select(mass)
                    kept.append(float(chosen.sum(-1).double().mean()))
                    noise.append(float((chosen & ~special).sum(-1).double().mean()))
                    held.append(round(float((mass * chosen).sum(-1).mean()), 4))
                rows.append({
                    "row": "noise", "selection": name, "structure": structure, "spread": spread,
                    "draws": draws, "tokens": list(tokens), "blocks": [n // BLOCK for n in tokens],
                    "kept": kept, "background_kept": noise, "mass_kept": held,
                    "exponent": round(exponent(tokens, kept), 3),
                })  # fmt: skip
    return rows


def main():
    """Run it, print a line a row, and append the rows to --out."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", help="JSONL, appended to")
    args = parser.parse_args()
    rows = [{**where(), **row} for row in experiment()]
    for r in rows:
        print(
            f"structure {r['structure']:.2f} spread {r['spread']:.2f} {r['selection']:<15} kept "
            f"{r['kept'][0]:6.1f} at {r['tokens'][0]} .. {r['kept'][-1]:7.1f} at "
            f"{r['tokens'][-1]}, exponent {r['exponent']:.2f}, mass {r['mass_kept'][-1]:.3f}"
        )
    if args.out:
        write_rows(rows, args.out)


if __name__ == "__main__":
    main()
