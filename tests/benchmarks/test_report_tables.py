"""README's tables from rows, and what the rows say about the targets."""

import json

import pytest

ROW = {
    "row": "attention", "machine": "GPU", "inputs": "structured", "heads": "llama-3.1-8b",
    "shape": "32/8 D 128", "length": 131072, "policy": "hybrid", "preset": "balanced",
    "kernel": "FLASH", "density": 0.12, "coverage": 0.95, "route_ms": 1.5, "sparse_ms": 27.0,
    "total_ms": 28.5, "sdpa_cudnn_ms": 250.0, "sdpa_flash_ms": 400.0, "fa4_ms": 240.0,
    "sparse_peak_mib": 1060.0, "sdpa_peak_mib": 1024.0, "inputs_mib": 1536.0, "kv_mib": 512.0,
    "index_mib": 32.0, "sparse_tflops": 600.0, "dense_tflops": 620.0,
}  # fmt: skip
CAPTURED = {
    **ROW, "inputs": "captured", "model": "m", "layer": 3, "heads": "captured", "length": 16384,
    "density": 0.5, "sdpa_cudnn_ms": 4.0, "sdpa_flash_ms": 7.0, "total_ms": 2.0,
}  # fmt: skip
MARKED = "before\n<!-- {0}:begin -->\nold\n<!-- {0}:end -->\nafter\n"


def short(length, total, sdpa):
    return {
        "row": "break-even", "inputs": "structured", "heads": "d128", "backend": "auto",
        "length": length, "total_ms": total, "total_launched_ms": 2 * total,
        "sdpa_cudnn_ms": sdpa, "sdpa_cudnn_launched_ms": sdpa,
    }  # fmt: skip


def test_a_table_stands_between_its_markers(module_of):
    text = module_of("report_tables").filled(MARKED.format("attention"), [ROW])
    assert text == (
        "before\n<!-- attention:begin -->\n"
        "| length | kernel | blocks kept | mass kept | selection | attention | both | "
        "dense: cuDNN | dense: flash | dense: FA4 | SDPA / ours | best dense / ours |\n"
        f"{'| --- ' * 12}|\n"
        "| 128k | FLASH | 12.0% | .950 | 1.50 | 27.0 | 28.5 | 250 | 400 | 240 | 8.77 | 8.42 |\n"
        "<!-- attention:end -->\nafter\n"
    )


def test_every_section_has_a_table(module_of):
    report = module_of("report_tables")
    prefill = {
        "row": "prefill", "step": "prompt", "length": 8192, "layers": 4, "plain_ms": 60.0,
        "crisp_flex_ms": 50.0, "ratio": 1.2, "density": 0.3,
    }  # fmt: skip
    rows = [
        ROW, CAPTURED, {**ROW, "heads": "gemma-3-4b"}, short(4096, 1.0, 2.0), prefill,
        {**prefill, "row": "short", "step": "decode", "density": None},
    ]  # fmt: skip
    for name in report.SECTIONS:
        text = report.filled(MARKED.format(name), rows)
        assert "old" not in text
        assert text.count("\n| ") == 3, name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MARKED.format("nonsense"), "no section 'nonsense'"),
        ("<!-- attention:begin -->\n", "no pair"),
        (MARKED.format("captured"), "no rows for 'captured'"),
    ],
)
def test_a_marker_that_cannot_be_filled_is_an_error(module_of, text, message):
    with pytest.raises(SystemExit, match=message):
        module_of("report_tables").filled(text, [ROW])


def test_a_later_row_about_the_same_thing_counts(module_of, tmp_path):
    report = module_of("report_tables")
    later = {**ROW, "total_ms": 20.0, "commit": "b"}
    other = {**ROW, "kernel": "TRITON"}
    (tmp_path / "a-1.jsonl").write_text(f"{json.dumps(ROW)}\n{json.dumps(other)}\n")
    (tmp_path / "a-2.jsonl").write_text(f"{json.dumps(later)}\n")
    rows = report.read_rows(tmp_path)
    assert [(row["kernel"], row["total_ms"]) for row in rows] == [("FLASH", 20.0), ("TRITON", 28.5)]


def test_check_fails_on_a_stale_readme(module_of, tmp_path, monkeypatch):
    report = module_of("report_tables")
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    readme = tmp_path / "README.md"
    readme.write_text(MARKED.format("attention"))
    arguments = ["report_tables", "--results", str(tmp_path), "--documents", str(readme)]
    monkeypatch.setattr("sys.argv", [*arguments, "--check"])
    with pytest.raises(SystemExit, match="stale"):
        report.main()
    monkeypatch.setattr("sys.argv", arguments)
    report.main()
    monkeypatch.setattr("sys.argv", [*arguments, "--check"])
    report.main()


def test_the_documents_have_the_tables_of_the_committed_results(module_of):
    report = module_of("report_tables")
    rows = report.read_rows()
    for file in report.DOCUMENTS:
        text = file.read_text(encoding="utf-8")
        assert "<!-- prefill:begin -->" in text
        assert report.filled(text, rows) == text


def test_a_ratio_stands_beside_both_its_times(module_of):
    text = module_of("report_tables").ratios([ROW])
    assert text.splitlines()[2] == (
        "| 128k | FLASH | 12.0% | .950 | 28.5 | 250 | 8.77 | 240 | 8.42 |"
    )


def test_the_picture_is_drawn(module_of, tmp_path):
    pytest.importorskip("matplotlib")
    module_of("attention_plot").draw([ROW, {**ROW, "length": 32768}], tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes()[1:4] == b"PNG"


def test_targets_are_met_or_missed(module_of):
    verdicts = module_of("targets").verdicts
    met = verdicts([ROW])
    assert len(met) == 4
    assert all(line.startswith("met") for line in met)
    assert "250.000 / 28.500 ms = 8.77x at 12.0%, target 8x" in met[0]
    worse = {
        "total_ms": 40.0,
        "sparse_ms": 38.0,
        "sparse_peak_mib": 1600.0,
        "index_mib": 60.0,
        "sparse_tflops": 400.0,
    }
    missed = verdicts([{**ROW, **worse}])
    assert [line[:6] for line in missed] == ["MISSED"] * 4
    # another kernel is held against another dense path, which this row does not have
    assert len(verdicts([{**ROW, "kernel": "TRITON"}])) == 3


def test_captured_rows_are_held_against_the_sparse_floor(module_of):
    verdicts = module_of("targets").verdicts
    (met,) = verdicts([CAPTURED])
    assert met.startswith("met")
    assert "total 2.000 <= 2.600 ms" in met
    (missed,) = verdicts([{**CAPTURED, "total_ms": 2.7}])
    assert missed.startswith("MISSED")
    (slower,) = verdicts([{**CAPTURED, "length": 8192, "total_ms": 4.1}])
    assert slower.startswith("MISSED")
    assert "never slower than dense" in slower


def test_break_even_is_the_length_from_which_on_sparse_wins(module_of):
    targets = module_of("targets")
    rows = [short(2048, 1, 3), short(4096, 4, 3), short(8192, 5, 9), short(16384, 9, 30)]
    assert targets.shortest_win(rows) == 8192
    assert targets.shortest_win(rows, "_launched_ms") == 16384
    assert targets.shortest_win(rows[:2]) is None
    as_graph, as_called = targets.break_even(rows)
    assert (
        as_graph == "met    d128 structured auto: sparse wins from 8192 tokens on as a CUDA graph"
    )
    assert as_called.startswith("MISSED")
