"""crisp-flex bench: what it recommends from which times, its config file, and what it refuses."""

import doctest
import json

import pytest

from crisp_flex import CrispConfig, CrispFlexError
from crisp_flex.bench import attention, exact, recommend
from crisp_flex.bench.recommend import Row
from crisp_flex.cli import bench, main

DENSE_MS = {2048: 1.0, 4096: 4.0, 8192: 16.0}


def rows(**sparse_ms):
    """A row per length and preset; sparse_ms: preset -> times at 2k, 4k and 8k."""
    return [
        Row(
            length=length, preset=preset, kernel="TRITON", density=0.2, mass=0.95, error=1e-3,
            dense="flash", dense_ms=DENSE_MS[length], sparse_ms=time, timed="graph",
        )
        for preset, times in sparse_ms.items()
        for length, time in zip(DENSE_MS, times, strict=True)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("balanced", "accurate", "preset", "min_seqlen"),
    [
        ((1.5, 3.0, 8.0), (1.8, 3.9, 10.0), "balanced", 4096),
        ((1.5, 3.0, 8.0), (1.5, 3.0, 8.5), "accurate", 4096),
        ((0.5, 4.1, 8.0), (1.0, 9.0, 16.0), "balanced", 8192),  # a win below a loss is none
        ((1.5, 3.9, 15.0), (1.5, 4.0, 16.0), "balanced", 8192),  # less than a twentieth is none
        ((1.5, 5.0, 17.0), (1.5, 5.0, 17.0), "balanced", 8193),
    ],
    ids=["balanced", "accurate costs little more", "win below a loss", "hardly", "never"],
)
def test_recommended_is_what_wins_from_a_length_on(balanced, accurate, preset, min_seqlen):
    fast = (0.1, 0.1, 0.1)
    got = recommend.recommend(rows(fast=fast, balanced=balanced, accurate=accurate))
    assert (got.preset, got.min_seqlen) == (preset, min_seqlen)
    assert got.pays == (min_seqlen <= 8192)
    assert "was not faster there" in str(got) or f"from {min_seqlen} tokens on" in str(got)


def test_the_example_is_exact():
    assert doctest.testmod(recommend) == doctest.TestResults(failed=0, attempted=3)


@pytest.mark.slow
def test_a_layer_is_measured_and_the_file_can_be_loaded(tmp_path, capsys):
    file = tmp_path / "here" / "crisp.toml"
    arguments = ["--query-heads", "2", "--key-heads", "1", "--head-dim", "32", "--budget", "0.01"]
    arguments += ["--lengths", "384", "--device", "cpu", "--out", str(file), "--json"]
    assert main(["bench", *arguments]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [row["preset"] for row in answer["rows"]] == ["fast", "balanced", "accurate"]
    for row in answer["rows"]:
        assert 0 < row["density"] <= 1
        assert 0.5 < row["mass"] <= 1
        assert row["error"] < 1e-5
        assert row["ratio"] == pytest.approx(row["dense_ms"] / row["sparse_ms"])
    found = answer["recommended"]
    assert CrispConfig.load(file) == CrispConfig.preset(
        found["preset"], min_seqlen=found["min_seqlen"]
    )


def test_the_table_has_a_line_a_row_and_the_recommendation():
    some = rows(fast=(1, 2, 5), balanced=(1.5, 3, 8), accurate=(2, 4, 10))
    text = bench.describe(some, recommend.recommend(some), "32/8 heads, D 128, bfloat16")
    assert text.count("TRITON") == 9
    assert "   8192  balanced  TRITON   20.0%  0.950    16.000     8.000         2.00" in text
    assert text.endswith('Recommended: preset "balanced", sparse from 4096 tokens on')


def test_a_wrong_result_is_not_timed(qkv, monkeypatch):
    monkeypatch.setattr(attention.attention, "sparse_attention", lambda q, *_, **__: q)
    monkeypatch.setattr(attention, "gpu_time", lambda *_, **__: pytest.fail("timed"))
    q, k, v = qkv(Hq=2, Hkv=1, Lq=256, D=32)
    with pytest.raises(CrispFlexError, match=r"is wrong at 256 tokens .* please report"):
        attention._row(q, k, v, "fast", "auto", dense="CPU", dense_ms=1.0, budget_ms=1.0)


def test_a_wrong_dense_result_is_nothing_to_compare_with(qkv, monkeypatch):
    q, k, v = qkv(Hq=2, Hkv=1, Lq=256, D=32)
    monkeypatch.setattr(attention, "sdpa_calls", lambda *_: {"wrong": lambda: q})
    with pytest.raises(CrispFlexError, match="no dense SDPA kernel takes float32 and head dim 32"):
        attention.fastest_sdpa(q, k, v, budget_ms=1.0)


@pytest.mark.parametrize("L", [1, 128, 700, 8192])
def test_sampled_rows_are_inside_and_have_both_ends(L):
    found = exact.sampled_rows(L)
    assert found[0] == 0
    assert found[-1] == (L - 1) // 128


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--lengths", "100"], "--lengths has 100: give lengths of at least 256 tokens"),
        (["--query-heads", "9", "--key-heads", "2"], "the first must be a multiple of the second"),
        (["--head-dim", "12"], "--head-dim is 12: give a multiple of 8 from 16 to 256"),
        (["--budget", "0"], "--budget is 0.0: give seconds above 0"),
        (["--device", "abacus"], "must be cpu, cuda or cuda:N"),
    ],
    ids=["length", "heads", "head dim", "budget", "device"],
)
def test_wrong_values_are_one_sentence(arguments, says, capsys):
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_a_length_that_is_none_says_how_to_write_one(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--lengths", "many"])
    assert "'many' is no number of tokens: write 4096 or 4k" in capsys.readouterr().err
