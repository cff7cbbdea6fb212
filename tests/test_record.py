"""What `record` collects: true numbers, joined head groups, one row a call, named sites."""

import dataclasses
import sys
import threading

import pytest
import torch

import crisp_flex
from crisp_flex import (
    ConfigError,
    CrispConfig,
    CrispFlexError,
    SiteReport,
    UnavailableError,
    torch_internals,
)
from crisp_flex.block_lists import kept_blocks
from crisp_flex.graph_run import run_of
from crisp_flex.record_table import HEADS, LEGEND
from crisp_flex.routing import ops
from crisp_flex.routing.params import RouteParams
from tests.families.models import ids, make

CONFIG = CrispConfig(
    policy="streaming", streaming_blocks=2, block_size=(16, 16), min_seqlen=32, max_uncovered=1.0
)
SITE = SiteReport(0, "attn", "layers.0", "", "causal", max_uncovered=0.01)


def params(**changes):
    return RouteParams.from_config(dataclasses.replace(CONFIG, **changes), D=32)


@pytest.fixture
def without_inductor(monkeypatch):
    monkeypatch.setattr(torch_internals, "compile_with_inductor", lambda gm, *_: gm.forward)
    with torch.no_grad():
        yield


def test_a_row_has_the_density_of_the_lists(qkv):
    q, k, _ = qkv(Lq=200, D=32)
    with crisp_flex.record() as rec:
        counts, buffer, full, stats = ops.route(q, k, None, params())
    kept = kept_blocks(counts, buffer, full, 13)[0]
    (row,) = rec.rows
    assert row.density_by_head == pytest.approx((kept.sum((-1, -2)) / (13 * 14 / 2)).tolist())
    assert row.density == pytest.approx(float(kept.sum()) / (4 * 13 * 14 / 2))
    assert row.uncovered == pytest.approx(float((1 - stats[..., 3]).max()))
    assert all(torch.equal(mask, kept[head]) for head, mask in row.masks.items())
    assert (row.length, row.policy, row.overflow) == (200, "streaming", 0)
    assert row.block_size == (16, 16)
    assert not ops.watched()


def test_the_audit_measures_the_softmax_mass_of_the_kept_blocks(qkv):
    q, k, _ = qkv(B=2, Lq=80, Lkv=208, D=32)
    valid = torch.ones(2, 208, dtype=torch.bool)
    valid[1, :40] = False
    with crisp_flex.record(audit=5) as rec:
        result = ops.route(q, k, valid, params(dense_last_blocks=0))
    (row,) = rec.rows
    kept = kept_blocks(*result[:3], 13).repeat_interleave(16, -1).repeat_interleave(16, -2)
    logits = q @ k.repeat_interleave(2, 1).mT / 32**0.5
    visible = torch.ones(80, 208, dtype=torch.bool).tril(128) & valid[:, None, None]
    mass = (logits.masked_fill(~visible, -torch.inf).softmax(-1) * kept).sum(-1)
    of_blocks = mass.reshape(2, 4, 5, 16).mean(-1)
    assert row.audited == [0, 1, 2, 3, 4]
    assert row.mass == pytest.approx(of_blocks.mean((0, 2)).tolist(), abs=1e-5)
    assert row.mass_min == pytest.approx(float(of_blocks.min()), abs=1e-5)
    assert row.mass_min < 0.9  # something was left out


def test_head_groups_are_one_row_with_the_heads_in_order(qkv):
    q, k, _ = qkv(Lq=200, D=32)
    with crisp_flex.record(audit=1) as rec:
        with run_of(None, (SITE,)):
            ops.route(q, k, None, params())
        with run_of(None, (SITE,)):
            for head in range(2):
                part = q[:, 2 * head : 2 * head + 2], k[:, head : head + 1]
                ops.route(*part, None, params())
    whole, joined = rec.rows
    assert (whole.head_groups, joined.head_groups) == (1, 2)
    assert joined.density_by_head == whole.density_by_head
    assert joined.mass == pytest.approx(whole.mass)
    assert joined.site == "layers.0"
    assert joined.violations == 4  # streaming on random keys leaves out more than a hundredth


def test_a_dense_last_block_of_its_own_counts_as_kept(qkv):
    q, k, _ = qkv(Lq=200, D=32)
    apart = dataclasses.replace(SITE, last_blocks_apart=2)
    with crisp_flex.record() as rec:
        ops.route(q, k, None, params(dense_last_blocks=2))
        with run_of(None, (apart,)):
            ops.route(q, k, None, params(dense_last_blocks=0))
    inside, outside = rec.rows
    assert outside.density_by_head == pytest.approx(inside.density_by_head)
    assert [mask.sum() for mask in outside.masks.values()] == [
        mask.sum() for mask in inside.masks.values()
    ]


def test_threads_do_not_mix_their_rows(qkv):
    q, k, _ = qkv(Lq=64, D=32)
    together = threading.Barrier(2)

    def serve(name):
        site = dataclasses.replace(SITE, module_path=name)
        with run_of(None, (site,)):
            for _ in range(2):  # two head groups each, in turns
                together.wait()
                ops.route(q, k, None, params())

    threads = [threading.Thread(target=serve, args=(name,), name=name) for name in ("a", "b")]
    with crisp_flex.record() as rec:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted((r.site, r.thread, r.head_groups) for r in rec.rows) == [
        ("a", "a", 2),
        ("b", "b", 2),
    ]


def test_rows_of_a_model_are_named_by_its_modules_and_generate_makes_them_once(without_inductor):
    model, other = (crisp_flex.compile(make("Llama"), CONFIG) for _ in range(2))
    with crisp_flex.record(model=model) as rec:
        other(input_ids=ids())
        model.generate(ids(), max_new_tokens=2, min_new_tokens=2, do_sample=False)
    names = [f"model.layers.{layer}.self_attn" for layer in range(2)]
    assert [row.site for row in rec.rows] == names
    assert {row.model for row in rec.rows} == {"LlamaForCausalLM"}
    assert all(name in rec.summary() for name in names)


@pytest.mark.parametrize(("calls", "Hq", "maps"), [(1, 1, 1), (2, 2, 4), (6, 9, 12)])
def test_a_plot_has_the_maps_of_at_most_three_heads_of_four_calls(qkv, tmp_path, calls, Hq, maps):
    pytest.importorskip("matplotlib")
    q, k, _ = qkv(Hq=Hq, Hkv=1, Lq=100, D=32)
    with crisp_flex.record() as rec, run_of(None, (SITE,) * calls):
        for site in range(calls):
            torch.ops.crisp_flex.route.default(q, k, None, *params().as_args(), site=site)
    figure = rec.plot(title="synthetic")
    titles = [axes.get_title() for axes in figure.axes]
    assert figure.get_suptitle() == "synthetic"
    assert sum("head " in title and ": " in title for title in titles) == maps
    figure.savefig(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_report_is_one_file_without_network(qkv, tmp_path):
    pytest.importorskip("matplotlib")
    q, k, _ = qkv(Lq=200, D=32)
    with crisp_flex.record(audit=1) as rec:
        ops.route(q, k, None, params())
    rec.save_html(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert '<td class="whole">call 0</td><td class="number">200</td>' in text
    assert "data:image/png;base64," in text
    assert "http" not in text
    assert "color-scheme:light dark" in text
    assert text.count("<td") == len(HEADS)
    assert {name for name, _ in LEGEND} < set(HEADS)


def test_wrong_use_is_one_sentence(monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match="audit must be a number of query blocks, 0 or more"):
        crisp_flex.record(audit=-1).__enter__()
    with pytest.raises(ConfigError, match="leave model= out"):
        crisp_flex.record(model=torch.nn.Linear(2, 2)).__enter__()
    with crisp_flex.record() as rec:
        pass
    with pytest.raises(CrispFlexError, match=r"nothing was recorded: .*explain\(model, "):
        rec.save_html(tmp_path / "x.html")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UnavailableError, match="pip install pandas, or use to_dict"):
        rec.to_pandas()
