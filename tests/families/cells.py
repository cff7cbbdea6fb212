"""One cell of the table: what the passes do to a call of a model; its logits stay right."""

from collections import Counter
from dataclasses import dataclass

import torch

from crisp_flex import CrispConfig
from crisp_flex.passes.pipeline import run_passes
from tests.families.models import CALLS, WITHOUT_SDPA, make

# Every block is kept, and the eager operator reads no lists: what is compared is the masks.
CONFIG = CrispConfig(min_seqlen=32, block_size=(16, 16), policy="dense")


@dataclass(frozen=True, slots=True)
class Cell:
    """What happened to the attention calls of one call of a model.

    Args:
        outcomes: How often each: a policy, or a Reason's name.
        error: Relative, of the logits people read, against the model alone.
    """

    outcomes: Counter
    error: float

    def __str__(self):
        if not self.outcomes:
            return "no SDPA call"
        return ", ".join(
            f"{count} {what if what.islower() else 'dense: ' + what}"
            for what, count in sorted(self.outcomes.items())
        )


def run(family, call, *, dynamic=False):
    """The cell of a family and a call, through Dynamo and without Inductor."""
    model = make(family)
    alone = make(family, attention="eager") if family in WITHOUT_SDPA else model
    made = CALLS[call](alone)
    with torch.no_grad():
        want = _result(alone(**made.kwargs))
        again = CALLS[call](model)  # a cache is used up by a call
        reports = []

        def backend(gm, example_inputs):
            reports.append(run_passes(gm, CONFIG))
            return gm.forward

        compiled = torch.compile(model, backend=backend, dynamic=dynamic)
        got = _result(compiled(**again.kwargs))
    rows = made.rows.expand(want.shape[:2])
    error = ((got - want)[rows].norm() / want[rows].norm()).item()
    sites = [site for report in reports for site in report.sites]
    outcomes = Counter(
        site.policy.replace("dense", "sparse") if site.rewritten else site.rejection.reason.name
        for site in sites
    )
    return Cell(outcomes, error)


def _result(output):
    return output.logits if hasattr(output, "logits") else output.last_hidden_state
