"""A site in head groups: the same result, one output buffer, a group's tensors freed in time."""

import re

import pytest
import torch
import torch.nn.functional as F
from graphs import capture, causal, padded_mask, targets
from masked_attention import masked_attention, relative_error
from routed_blocks import routed_blocks
from torch._inductor.utils import run_and_get_code

from crisp_flex import CrispConfig, CrispFlexBackend, head_groups
from crisp_flex.passes.pipeline import run_passes

SPARSE = CrispConfig(
    min_seqlen=128, policy="streaming", streaming_blocks=1, dense_last_blocks=0, max_uncovered=1.0
)
ROUTES = (torch.ops.crisp_flex.route.default, torch.ops.crisp_flex.route_after.default)
WRITE = torch.ops.crisp_flex.write_heads.default
SLICE = torch.ops.aten.slice.Tensor


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


@pytest.fixture
def in_groups(monkeypatch):
    """in_groups(count): every site is computed in that many head groups."""

    def force(count):
        monkeypatch.setattr(head_groups, "count_groups_of", lambda *args, **kwargs: count)

    return force


def counts(backend):
    return [site.head_groups for report in backend.reports.values() for site in report.sites]


@pytest.mark.parametrize(("Hq", "Hkv", "count"), [(12, 4, 2), (8, 2, 4), (3, 3, 3)])
def test_groups_give_what_one_call_gives(Hq, Hkv, count, in_groups, qkv):
    """Two KV heads with their queries at a time, half the queries of one, single heads."""
    q, k, v = qkv(B=2, Hq=Hq, Hkv=Hkv, Lq=500, D=32)
    in_groups(count)
    backend = CrispFlexBackend(SPARSE)
    got = torch.compile(causal, backend=backend, fullgraph=True)(q, k, v)
    assert counts(backend) == [count]
    assert relative_error(got, masked_attention(q, k, v, routed_blocks(q, k, SPARSE))) < 2e-6
    assert relative_error(got, causal(q, k, v)) > 0.1


def test_groups_of_a_padded_batch(in_groups, qkv):
    q, k, v = qkv(B=2, Lq=400, D=32)
    attention_mask = torch.ones(2, 400, dtype=torch.int64)
    attention_mask[0, :170] = 0
    in_groups(2)
    got = torch.compile(padded_mask, backend=CrispFlexBackend(SPARSE))(q, k, v, attention_mask)
    valid = attention_mask.bool()
    want = masked_attention(q, k, v, routed_blocks(q, k, SPARSE, valid), key_valid=valid)
    assert relative_error(got, want) < 2e-6


def test_the_groups_share_key_heads_and_one_result(in_groups, qkv):
    in_groups(4)
    gm = capture(causal, *qkv(Hq=8, Hkv=2, Lq=256))
    assert str(run_passes(gm, SPARSE).sites[0]).count("streaming on CPU in 4 head groups") == 1
    assert sum(target in ROUTES for target in targets(gm)) == 4
    cut = [node.args for node in gm.graph.nodes if node.target is SLICE]
    assert sorted(args[2:] for args in cut if args[0].name == "l_k_") == [(0, 1), (1, 2)]
    writes = [node for node in gm.graph.nodes if node.target is WRITE]
    assert [node.args[2] for node in writes] == [0, 2, 4, 6]
    assert len({node.args[0] for node in writes}) == 1


def fused(x):
    """As after a fused projection: heads beside each other, and a `.view` that needs them so."""
    B, L, _ = x.shape
    q, k, v = (t.view(B, L, 6, 16).transpose(1, 2) for t in x.chunk(3, -1))
    out = F.scaled_dot_product_attention(q * 2, k, v, is_causal=True)
    return out.transpose(1, 2).view(B, L, -1) + 1


def test_a_group_is_freed_before_the_next_one_starts(in_groups):
    """Read off Inductor's program: one output, no copy of the whole, nothing of a group left."""
    in_groups(3)
    x = torch.randn(2, 300, 3 * 6 * 16)
    compiled = torch.compile(fused, backend=CrispFlexBackend(SPARSE))
    got, (program, *_) = run_and_get_code(compiled, x)
    lines = re.search(r"def call\(self, args\):\n(.*?)\n\n\n", program, re.DOTALL)[1].splitlines()
    steps, alive, at_start = [], set(), []
    for line in map(str.strip, lines):
        for name in re.findall(r"^(buf\d+) = ", line):
            alive.add(name)
        if found := re.match(r"del (buf\d+)|buf\d+ = (buf\d+); del", line):
            alive.discard(found[1] or found[2])
        if "torch.ops.crisp_flex.write_heads" in line:
            steps.append("write")
            (out,) = set(
                re.findall(r"write_heads\.default\((?:reinterpret_tensor\()?(buf\d+)", line)
            )
        elif "= torch.ops.crisp_flex.route_after" in line:
            steps.append("route")
            at_start.append(len(alive))
        elif "= repeated_subgraph" in line:
            steps.append("attend")
    assert steps == ["route", "attend", "write"] * 3
    assert program.count(f"{out} = empty_strided") == 1
    assert "cat" not in re.findall(r"aten\.(\w+)", program)
    # out, q and k of the group, and the result of the call itself
    assert at_start == [at_start[0]] * 3
    assert at_start[0] <= 4
    with torch.no_grad():
        q, k, v = (t.view(2, 300, 6, 16).transpose(1, 2) for t in x.chunk(3, -1))
    want = masked_attention(q * 2, k, v, routed_blocks(q * 2, k, SPARSE))
    assert relative_error(got, want.transpose(1, 2).reshape(2, 300, -1) + 1) < 2e-6


def test_long_prompts_get_a_dynamic_graph_of_their_own(monkeypatch, qkv):
    monkeypatch.setattr(head_groups, "GROUPED_DEVICES", ("cpu",))
    monkeypatch.setattr(head_groups, "ONE_GROUP_TOKENS", 500)
    monkeypatch.setattr(head_groups, "MAX_TABLE_SHARE", 1e-3)
    backend = CrispFlexBackend(SPARSE)
    fn = torch.compile(causal, backend=backend, dynamic=True, fullgraph=True)
    for L in (300, 640, 500, 1000, 501):
        q, k, v = qkv(Lq=L, D=32)
        want = masked_attention(q, k, v, routed_blocks(q, k, SPARSE))
        assert relative_error(fn(q, k, v), want) < 2e-6, L
    # the graph of 640 serves up to 1024, and has the groups that 1024 needs
    assert counts(backend) == [1, 4]
    q, k, v = qkv(Lq=1100, D=32)
    fn(q, k, v)
    assert counts(backend)[:2] == [1, 4]
    assert len(counts(backend)) == 3
