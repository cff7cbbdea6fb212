"""The four claims of the paper (CRISP, arXiv 2609.01925), each judged by a rule from the rows.

A verdict is "reproduced", "partly", "not" or "not measured". The rules stand in the claims, so that
the page shows them next to the numbers they were applied to.
"""

import statistics
from collections import defaultdict
from dataclasses import dataclass

import quality_policies
from report_frontier import mean_error

from crisp_flex import ConfigError

REPRODUCED, PARTLY, NOT, NOT_MEASURED = "reproduced", "partly", "not", "not measured"
PAPER_AGREEMENT = (0.940, 0.881)
# Exponents of kept ~ n^e from and to which growth is in proportion to n, or none.
PROPORTIONAL, CONSTANT = 0.8, 0.2
# Dense must reach this score on a task at a length for that cell to count.
DENSE_CAN = 0.5
# Fewer prompts than this say nothing.
LEAST_PROMPTS = 20
# Nats per token that count as no loss.
LOSS_PARITY = 0.02
GAMMAS = {"cumulative .9": 0.9, "cumulative .95": 0.95}
PAPER, GAMMA, OURS = "crisp:alpha=1", "flexprefill:gamma=.95", "balanced"


@dataclass(frozen=True)
class Claim:
    """One claim: what the paper says, what was measured, the verdict and the rule behind it."""

    name: str
    paper: str
    measured: str
    verdict: str
    rule: str


def claims(rows):
    """The four Claims in the order of the paper."""
    return [
        routing_agreement(rows), noise_growth(rows), retrieval_against_gamma(rows),
        parity_with_dense(rows),
    ]  # fmt: skip


def routing_agreement(rows):
    """c_struct sends a head where the JSD would."""
    shares = defaultdict(list)
    for r in rows:
        if r["row"] == "routing":
            shares[r["model"]].append(r["agreement"])
    means = {model: statistics.fmean(values) for model, values in shares.items()}
    least = min(PAPER_AGREEMENT)
    return Claim(
        "routing agreement",
        "c_struct agrees with the JSD router on 94.0 % (Llama-3.1-8B) and 88.1 % (Qwen2.5-7B)",
        "; ".join(f"{model} {100 * mean:.1f} %" for model, mean in means.items()),
        _share(mean >= least for mean in means.values()),
        f"reproduced: every model's mean over texts and lengths is at least {100 * least:.1f} %; "
        "partly: some model's",
    )


def noise_growth(rows):
    """Cumulative mass keeps O(n) background blocks, the floor does not."""
    rows = [r for r in rows if r["row"] == "noise"]
    floor = [r["exponent"] for r in rows if r["selection"] == "floor alpha 1"]
    paid = [r["exponent"] for r in rows if r["structure"] < GAMMAS.get(r["selection"], 0)]
    verdict, measured = NOT_MEASURED, ""
    if floor and paid:
        flat = sum(e <= CONSTANT for e in floor)
        grows = statistics.median(paid) >= PROPORTIONAL
        verdict = NOT
        if grows and flat:
            verdict = REPRODUCED if flat == len(floor) else PARTLY
        measured = (
            f"cumulative mass: median exponent {statistics.median(paid):.2f} where the structure "
            f"is below gamma; floor: at most {CONSTANT} on {flat} of {len(floor)} maps, largest "
            f"{max(floor):.2f}"
        )
    return Claim(
        "O(n) noise",
        "cumulative-mass selection keeps noise blocks in proportion to n; the floor does not",
        measured,
        verdict,
        f"reproduced: median exponent of cumulative mass >= {PROPORTIONAL} and the floor's <= "
        f"{CONSTANT} on every map; partly: the floor's on some maps",
    )


def retrieval_against_gamma(rows):
    """The floor retrieves better than FlexPrefill's gamma."""
    got = paired(rows, PAPER, GAMMA)
    verdict = NOT_MEASURED
    if got:
        verdict = REPRODUCED if got.mean > got.error else PARTLY if got.mean >= -got.error else NOT
    return Claim(
        "retrieval against gamma",
        "the floor retrieves at least as well as cumulative gamma (RULER)",
        _said(("alpha 1 - gamma .95", got), ("balanced - gamma .95", paired(rows, OURS, GAMMA))),
        verdict,
        f"paired scores on the same prompts where dense reaches {DENSE_CAN}, at least "
        f"{LEAST_PROMPTS}; reproduced: better by "
        "more than one standard error; partly: within one; not: worse by more",
    )


def parity_with_dense(rows):
    """Quality of alpha 1 is that of dense attention."""
    got, losses = paired(rows, PAPER, "dense"), loss_differences(rows, PAPER)
    held = [loss <= LOSS_PARITY for loss in losses.values()]
    if got:
        held.append(got.mean >= -got.error)
    verdict = _share(held)
    if verdict == REPRODUCED and not (got and losses):
        verdict = PARTLY  # half of it was not measured
    texts = "; ".join(f"{model}, {text} {d:+.3f}" for (model, text), d in losses.items())
    ours = paired(rows, OURS, "dense")
    said = _said(("alpha 1 - dense", got), ("balanced - dense", ours))
    return Claim(
        "quality parity with dense",
        "alpha 1 against dense: RULER 88.82 and 89.02, InfiniteBench 48.7 and 48.6, LongBench "
        "47.77 and 48.82 (Llama-3.1-8B)",
        "; ".join(filter(None, (said, texts and f"loss of alpha 1, nats: {texts}"))),
        verdict,
        "reproduced: retrieval within one standard error of dense or above, and on every model and "
        f"text at most {LOSS_PARITY} nats per token lost; partly: some of these, or one kind was "
        "not measured",
    )


@dataclass(frozen=True)
class Paired:
    """Mean of score differences on the same prompts, its standard error, and their number."""

    mean: float
    error: float
    samples: int


def paired(rows, policy, other):
    """Paired of two policies' scores where dense reaches DENSE_CAN; None below LEAST_PROMPTS."""
    tasks = [r for r in rows if r["row"] == "task"]
    dense = defaultdict(list)
    for r in tasks:
        if r["policy"] == "dense":
            dense[_cell(r)[:-2]].append(r["score"])
    able = {cell for cell, scores in dense.items() if statistics.fmean(scores) >= DENSE_CAN}
    ours, theirs = (
        {_cell(r): r["scores"] for r in tasks if same(r["policy"], name)}
        for name in (policy, other)
    )
    differences = [
        a - b
        for cell, scores in ours.items()
        if cell in theirs and cell[:-2] in able
        for a, b in zip(scores, theirs[cell], strict=True)
    ]
    if len(differences) < LEAST_PROMPTS:
        return None
    return Paired(*mean_error(differences), len(differences))


def loss_differences(rows, policy):
    """{(model, text): mean loss difference of a policy over windows and lengths}."""
    groups = defaultdict(list)
    for r in rows:
        if r["row"] == "text" and same(r["policy"], policy):
            groups[r["model"], r["text"]].append(r["loss_difference"])
    return {key: statistics.fmean(values) for key, values in groups.items()}


def same(policy, wanted):
    """Whether two spellings name one selection: "crisp" is "crisp:alpha=1"."""
    if policy == wanted or policy.startswith("select="):
        return policy == wanted
    try:
        a, b = (quality_policies.parse(p, dense_last_blocks=0).config for p in (policy, wanted))
    except ConfigError:  # rows of another version
        return False
    return a == b


def _cell(r):
    # the last two are left out where dense is judged: depth, and the number of prompts
    return (
        r["model"], r.get("dtype"), r.get("kernel"), r.get("dense_last_blocks"), r["length"],
        r["task"], r["depth"], r["samples"],
    )  # fmt: skip


def _share(held):
    held = list(held)
    if not held:
        return NOT_MEASURED
    return REPRODUCED if all(held) else PARTLY if any(held) else NOT


def _said(*pairs):
    return "; ".join(
        f"{name}: {p.mean:+.3f} ± {p.error:.3f} of {p.samples} prompts" for name, p in pairs if p
    )
