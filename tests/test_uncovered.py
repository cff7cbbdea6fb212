"""The guard on uncovered mass: warns or stops with a sentence, and costs nothing when "dense"."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

import crisp_flex
from crisp_flex import CrispConfig, UncoveredError, UncoveredWarning, torch_internals, uncovered
from crisp_flex.routing.params import STAT_NAMES
from crisp_flex.uncovered import UncoveredGuard

CONFIG = CrispConfig(
    policy="streaming", streaming_blocks=1, block_size=(16, 16), min_seqlen=32, max_uncovered=0.1
)


@pytest.fixture
def run(qkv, monkeypatch):
    """run(on_violation, overrides) -> the targets in the compiled graph."""

    def start(on_violation, overrides=None):
        graphs = []

        def as_it_is(gm, *_):
            graphs.append([node.target for node in gm.graph.nodes])
            return gm.forward

        monkeypatch.setattr(torch_internals, "compile_with_inductor", as_it_is)
        config = dataclasses.replace(CONFIG, on_violation=on_violation, overrides=overrides or {})
        attend = crisp_flex.compile(
            lambda q, k, v: F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            ),
            config,
        )
        with torch.no_grad():
            attend(*qkv(Lq=256, D=32))
        return graphs[0]

    return start


def test_dense_reads_nothing_back(run):
    assert torch.ops.crisp_flex.check_uncovered.default not in run("dense")


def test_warn_names_the_call_the_number_and_the_fix(run):
    with pytest.warns(
        UncoveredWarning, match=r"heads? leaves? out up to .* max_uncovered=0.1: use preset="
    ):
        assert torch.ops.crisp_flex.check_uncovered.default in run("warn")


def test_raise_stops_the_call_and_names_an_override_that_there_is(run):
    with pytest.raises(UncoveredError) as raised:
        run("raise")
    where, _, advice = str(raised.value).partition(": ")
    assert where == "attention call 0 (scaled_dot_product_attention)"
    assert advice.endswith('on_violation="dense", or overrides={0: {"enabled": False}}')
    assert torch.ops.crisp_flex.route.default not in run("raise", {0: {"enabled": False}})


def test_the_advice_for_a_plain_function_is_one_it_takes(qkv):
    q, k, v = qkv(Lq=256, D=32)
    calls = (
        lambda config: crisp_flex.route(q, k, config),
        lambda config: crisp_flex.sparse_attention(q, k, v, config=config),
    )
    strict = dataclasses.replace(CONFIG, on_violation="raise")
    for call in calls:
        with pytest.raises(UncoveredError, match=r'or policy="dense"$'):
            call(strict)
    calls[0](dataclasses.replace(strict, policy="dense"))


def test_what_is_no_number_is_a_violation():
    counts = torch.ones(1, 3, 2, dtype=torch.int32)
    stats = torch.ones(1, 3, len(STAT_NAMES))
    guard = UncoveredGuard.of(dataclasses.replace(CONFIG, on_violation="raise"), "here")
    assert torch.equal(uncovered.check_uncovered(counts, stats, guard), counts)
    stats[0, 1, STAT_NAMES.index("coverage")] = torch.nan
    with pytest.raises(UncoveredError, match=r"^here: 1 head leaves out .* not a number: look for"):
        uncovered.check_uncovered(counts, stats, guard)


def test_no_cuda_graph_is_captured_across_the_read_back():
    assert torch.Tag.cudagraph_unsafe in torch.ops.crisp_flex.check_uncovered.default.tags


def test_violations_are_counted_whatever_happens_then(qkv):
    q, k, _ = qkv(Lq=256, D=32)
    with crisp_flex.record() as rec:
        crisp_flex.route(q, k, CONFIG)
        with pytest.warns(UncoveredWarning):
            crisp_flex.route(q, k, dataclasses.replace(CONFIG, on_violation="warn"))
    dense, warned = rec.rows
    assert (dense.violations, dense.heads_dense, dense.density) == (4, 4, 1.0)
    assert (warned.heads_dense, warned.density < 1) == (0, True)
