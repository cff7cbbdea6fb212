"""benchmarks/report.py: means and errors, maps, and a page without a network reference."""

import json
import math
import struct
import sys

import pytest

pytest.importorskip("matplotlib")


def text(policy, window, kl, density, length=512):
    return {
        "row": "text", "model": "m", "length": length, "text": "code", "window": window,
        "policy": policy, "dense_last_blocks": 0, "density": density, "kl": kl, "recall": 0.9,
        "top1": 1.0, "loss_difference": 0.0, "layers": [3, 5],
        "density_by_layer_head": [[density, 0.1], [0.2, 0.3]],
    }  # fmt: skip


def task(policy, depth, score, length=512):
    return {
        "row": "task", "model": "m", "length": length, "policy": policy, "task": "single",
        "depth": depth, "score": score, "wilson": [0.3, 0.95], "samples": 4, "scores": [score] * 4,
    }  # fmt: skip


ROUTING = {
    "row": "routing", "model": "m", "length": 512, "text": "code", "window": 0, "layers": [3, 5],
    "c_struct": [[0.1, 0.9], [0.5, 0.2]], "root_jsd": [[0.01, 0.4], [0.2, 0.05]],
    "agreement": 0.875, "agreement_of_lines_only": 0.5,
}  # fmt: skip
NOISE = {
    "row": "noise", "selection": "floor alpha 1", "structure": 0.8, "spread": 0.25,
    "tokens": [4096, 8192], "blocks": [32, 64], "kept": [10, 12], "mass_kept": [0.8, 0.81],
    "exponent": 0.26,
}  # fmt: skip


def test_the_frontier_holds_means_errors_and_who_is_ahead(module_of):
    report = module_of("report_frontier")
    rows = [text("b", 0, 0.25, 0.6), text("a", 0, 0.1, 0.5), text("a", 1, 0.3, 0.5)]
    rows += [text("c", 0, 0.05, 0.9), ROUTING]
    (lines,) = report.frontier(rows).values()
    assert [name for name, *_ in lines] == ["a", "b", "c"]
    assert lines[0][2]["kl"] == pytest.approx((0.2, 0.1))
    assert math.isnan(lines[1][2]["kl"][1])
    # a beats b in both; c pays more and loses less
    assert report.best(lines) == ["a", "c"]


def test_the_needle_map_has_a_hole_where_nothing_was_measured(module_of):
    maps = module_of("report_maps")
    rows = [task("a", 0.1, 0.25), task("a", 0.9, 0.5), task("a", 0.9, 1.0, length=1024)]
    # a run with another setting does not write over them
    rows.append({**task("a", 0.1, 0.0), "dense_last_blocks": 1})
    cells, _ = maps.retrieval(rows).values()
    (first, second) = maps.needle_matrix(cells)
    assert first == [0.25, 0.5]
    assert math.isnan(second[0])
    assert second[1] == 1.0


def test_maps_by_head_are_those_of_the_longest_length(module_of):
    maps = module_of("report_maps")
    short, long, later = text("a", 0, 0.1, 0.5), text("a", 0, 0.1, 0.4, 1024), text("a", 1, 1, 1)
    assert maps.longest([short, long, later, ROUTING], "text") == {"m": [long]}


def test_a_run_writes_one_page_without_a_network_and_its_pictures(module_of, monkeypatch, tmp_path):
    report = module_of("report")
    rows = [text("<a>", 0, 0.2, 0.5), text("<a>", 1, 0.4, 0.5), text("dense", 0, 0.0, 1.0)]
    rows += [task("<a>", 0.5, 0.75), ROUTING, NOISE, {"row": "attention", "length": 1}]
    results, out = tmp_path / "rows.jsonl", tmp_path / "report.html"
    results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["report", str(results), "--out", str(out), "--png", str(tmp_path / "docs")]
    monkeypatch.setattr(sys, "argv", arguments)
    report.main()
    page = out.read_text()
    assert "0.3000 ± 0.1000" in page
    assert "0.75 [0.30, 0.95], 4" in page
    assert "87.5 %" in page
    assert "94.0 %" in page
    assert "12 of 64" in page
    assert "&lt;a&gt;" in page
    assert "<a>" not in page
    assert "http" not in page
    drawn = {path.name: path.read_bytes() for path in (tmp_path / "docs").iterdir()}
    kinds = ("frontier-m", "needle-m", "density-m", "routing-m", "noise")
    assert sorted(drawn) == sorted(f"quality-{kind}.png" for kind in kinds)
    assert page.count("<img ") == len(kinds)
    for data in drawn.values():
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        assert min(struct.unpack(">II", data[16:24])) > 100
