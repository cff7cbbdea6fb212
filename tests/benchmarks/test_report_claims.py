"""benchmarks/report_claims.py: each verdict follows its rule from the rows."""

import pytest


def routing(model, agreement):
    return {"row": "routing", "model": model, "agreement": agreement}


def noise(selection, exponent, structure=0.8):
    return {"row": "noise", "selection": selection, "structure": structure, "exponent": exponent}


def task(policy, scores, model="m", depth=0.5, times=5):
    scores = scores * times
    return {
        "row": "task", "model": model, "length": 512, "policy": policy, "task": "single",
        "depth": depth, "samples": len(scores), "scores": scores, "dtype": "float32",
        "score": sum(scores) / len(scores),
    }  # fmt: skip


def text(policy, loss, model="m"):
    return {
        "row": "text", "model": model, "text": "code", "policy": policy, "loss_difference": loss,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "verdict", "measured"),
    [
        ([], "not measured", ""),
        ([routing("a", 0.90), routing("a", 0.88), routing("b", 1.0)], "reproduced", "a 89.0 %"),
        ([routing("a", 0.86), routing("b", 0.95)], "partly", "b 95.0 %"),
        ([routing("a", 0.86)], "not", "a 86.0 %"),
    ],
)
def test_routing_agreement(module_of, rows, verdict, measured):
    claim = module_of("report_claims").claims(rows)[0]
    assert claim.verdict == verdict
    assert measured in claim.measured


@pytest.mark.parametrize(
    ("gamma", "floors", "verdict"),
    [
        (0.9, (0.1, 0.2), "reproduced"), (0.9, (0.1, 0.6), "partly"), (0.9, (0.5, 0.6), "not"),
        (0.4, (0.1, 0.1), "not"),
    ],
)  # fmt: skip
def test_noise_growth(module_of, gamma, floors, verdict):
    rows = [noise("floor alpha 1", e) for e in floors]
    # where the structure holds .95 alone nothing has to grow, and the map does not count
    rows += [noise("cumulative .9", gamma), noise("cumulative .9", 0.0, structure=0.97)]
    claim = module_of("report_claims").claims(rows)[1]
    assert claim.verdict == verdict
    assert f"median exponent {gamma:.2f}" in claim.measured


@pytest.mark.parametrize(
    ("paper", "gamma", "verdict"),
    [
        ([1, 1, 1, 1], [1, 0, 0, 1], "reproduced"), ([1, 0, 1, 1], [1, 1, 0, 1], "partly"),
        ([0, 0, 0, 1], [1, 1, 1, 1], "not"),
    ],
)  # fmt: skip
def test_retrieval_against_gamma(module_of, paper, gamma, verdict):
    rows = [task("dense", [1, 1, 1, 1]), task("crisp", paper)]
    rows += [task("flexprefill:gamma=0.95", gamma)]
    # a cell where dense fails says nothing
    rows += [task("dense", [0] * 4, "weak"), task("crisp:alpha=1", [0] * 4, "weak")]
    rows += [task("flexprefill:gamma=.95", [1] * 4, "weak")]
    claim = module_of("report_claims").claims(rows)[2]
    assert claim.verdict == verdict
    assert "of 20 prompts" in claim.measured


def test_a_paired_difference_has_its_own_error(module_of):
    module = module_of("report_claims")
    rows = [task("dense", [1, 1, 1, 1]), task("balanced", [1, 1, 0, 1])]
    got = module.paired(rows, "balanced", "dense")
    assert (got.mean, got.error, got.samples) == pytest.approx((-0.25, 0.09934, 20), abs=1e-5)
    assert module.paired(rows, "balanced", "crisp:alpha=1") is None
    few = [task(name, [1, 1, 1, 1], times=4) for name in ("dense", "balanced")]
    assert module.paired(few, "balanced", "dense") is None


@pytest.mark.parametrize(
    ("paper", "losses", "verdict"),
    [
        ([1, 1, 1, 1], (0.0, 0.01), "reproduced"), ([1, 1, 1, 1], (0.0, 0.5), "partly"),
        ([0, 0, 0, 1], (0.5, 0.5), "not"), (None, (0.0, 0.01), "partly"),
        ([1, 1, 1, 1], (), "partly"),
    ],
)  # fmt: skip
def test_parity_with_dense(module_of, paper, losses, verdict):
    rows = [text("crisp:alpha=1", loss, f"m{i}") for i, loss in enumerate(losses)]
    rows += [text("crisp:alpha=1.5", 9.0), task("dense", [1, 1, 1, 1])]
    rows += [task("crisp:alpha=1", paper)] if paper else []
    assert module_of("report_claims").claims(rows)[3].verdict == verdict
