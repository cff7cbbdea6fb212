"""benchmarks/report.py: means and errors, and a page without a network reference."""

import math

import pytest

pytest.importorskip("matplotlib")


def text(policy, window, kl, density):
    return {
        "row": "text", "model": "m", "length": 512, "text": "code", "window": window,
        "policy": policy, "dense_last_blocks": 0, "density": density, "kl": kl, "recall": 0.9,
        "top1": 1.0, "loss_difference": 0.0,
    }  # fmt: skip


def test_the_page_holds_means_errors_and_cells(module_of):
    report = module_of("report")
    rows = [text("b", 0, 0.2, 0.6), text("a", 0, 0.1, 0.5), text("a", 1, 0.3, 0.5)]
    cell = {
        "row": "task", "model": "m", "length": 512, "policy": "<a>", "task": "single",
        "depth": 0.5, "score": 0.75, "wilson": [0.3, 0.95], "samples": 4,
    }  # fmt: skip
    (lines,) = report.frontier(rows).values()
    assert [name for name, *_ in lines] == ["a", "b"]
    assert lines[0][2]["kl"] == pytest.approx((0.2, 0.1))
    assert math.isnan(lines[1][2]["kl"][1])
    page = report.page([*rows, cell])
    assert "0.2000 ± 0.1000" in page
    assert "0.75 [0.30, 0.95], 4" in page
    assert "&lt;a&gt;" in page
    assert "http" not in page
