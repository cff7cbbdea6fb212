"""The fuzzer by hand: many examples of one lane, counted.

    python -m tests.fuzz --lane masks --examples 20000 --seed 1

Lanes:
  routing   block lists of the eager reference against brute force, and its invariants (CPU)
  masks     random mask programs through the passes (CPU, no compiler)
  traced    the same traced by Dynamo, every other one with symbolic lengths (CPU)
  symbolic  masks whose lengths are read off shapes, traced with symbols and run at two lengths
  inductor  crisp_flex.compile of one attention call against float64 (CPU, a few s an example)
  gpu       sparse_attention in a handful of shapes against float64 over its own blocks (CUDA)

Exit status 1 and the smallest failing example if one fails.
"""

import argparse
import collections
import sys
import time

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.lanes import LANES


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--lane", choices=sorted(LANES), required=True)
    parser.add_argument("--examples", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    strategy, check = LANES[args.lane]()
    outcomes, start = collections.Counter(), time.perf_counter()

    @seed(args.seed)
    @settings(
        max_examples=args.examples, database=None, deadline=None, print_blob=False,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )  # fmt: skip
    @given(strategy)
    def run(example):
        outcomes[str(check(example))] += 1

    failed = False
    with torch.no_grad():
        try:
            run()
        except Exception as error:  # the report below counts what ran before it
            failed = True
            sys.excepthook(type(error), error, error.__traceback__)
    said = ", ".join(f"{count} {name}" for name, count in sorted(outcomes.items()))
    seconds = time.perf_counter() - start
    print(  # noqa: T201
        f"lane {args.lane}, seed {args.seed}: {sum(outcomes.values())} examples in {seconds:.0f} s"
        f" ({said}); {'FAILED' if failed else 'no failure'}"
    )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
