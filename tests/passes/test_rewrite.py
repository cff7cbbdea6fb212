"""What the rewritten graph looks like: no mask, no repeated heads, shared regions."""

import operator

import pytest
import torch
import torch.nn.functional as F
from graphs import capture, causal, causal_mask, large_masks, padded_mask, repeat_kv, targets

from crisp_flex import CrispConfig
from crisp_flex.passes.pipeline import run_passes
from crisp_flex.routing import ops
from crisp_flex.routing.params import STAT_NAMES

L = 256
CONFIG = CrispConfig(min_seqlen=128)
ROUTE = torch.ops.crisp_flex.route.default
SDPA = F.scaled_dot_product_attention


def test_a_causal_call_becomes_route_and_flex(qkv):
    gm = capture(causal, *qkv(Lq=L))
    report = run_passes(gm, CONFIG)
    assert [(site.kernel, site.policy) for site in report.rewritten] == [("CPU", "hybrid")]
    assert targets(gm).count(ROUTE) == 1
    assert SDPA not in targets(gm)


def test_a_lifted_mask_and_repeated_heads_leave_the_graph(qkv):
    gm = capture(causal_mask, *qkv(Hq=6, Hkv=2, Lq=L))
    assert large_masks(gm, L)
    report = run_passes(gm, CONFIG)
    assert [site.mask for site in report.rewritten] == ["causal"]
    assert large_masks(gm, L) == []
    (route,) = gm.graph.find_nodes(op="call_function", target=ROUTE)
    assert [node.args[0].name for node in route.args[:2]] == ["l_q_", "l_k_"]
    assert "reshape" not in [node.target for node in gm.graph.nodes]


def test_a_padding_mask_becomes_a_captured_key_mask(qkv):
    gm = capture(padded_mask, *qkv(B=2, Lq=L), torch.ones(2, L, dtype=torch.int64))
    report = run_passes(gm, CONFIG)
    assert [site.mask for site in report.rewritten] == ["causal + padding"]
    assert large_masks(gm, L) == []
    (route,) = gm.graph.find_nodes(op="call_function", target=ROUTE)
    assert route.args[2] is not None


def test_a_mask_that_another_call_still_needs_stays(qkv):
    def both(q, k, v):
        query = torch.arange(L)[None, None, :, None]
        key = torch.arange(L)[None, None, None, :]
        mask = key <= query
        kept = SDPA(q[..., :4], k[..., :4], v[..., :4], attn_mask=mask)  # head dim 4: refused
        return kept, SDPA(q, k, v, attn_mask=mask)

    gm = capture(both, *qkv(Hkv=4, Lq=L))
    report = run_passes(gm, CONFIG)
    assert [site.rewritten for site in report.sites] == [False, True]
    assert len(large_masks(gm, L)) == 1
    assert targets(gm).count(SDPA) == 1


def test_an_in_place_cache_update_survives(qkv):
    def fn(q, k, v, cache):
        cache.index_copy_(2, torch.arange(L), k)
        return causal_mask(q, k, v)

    gm = capture(fn, *qkv(Lq=L), torch.zeros(1, 2, L, 64))
    assert len(run_passes(gm, CONFIG).rewritten) == 1
    assert "index_copy_" in [node.target for node in gm.graph.nodes]


def test_alike_sites_share_one_region_on_the_cpu(qkv):
    def stack(q, k, v):
        for _ in range(3):
            q = causal(q, k, v)
        return causal(q[:, :2], k, v)

    gm = capture(stack, *qkv(Lq=L))
    assert len(run_passes(gm, CONFIG).rewritten) == 4
    regions = [name for name, _ in gm.named_children() if name.startswith("crisp_flex_region")]
    assert len(regions) == 2  # four heads three times, two heads once
    assert targets(gm).count(torch.ops.higher_order.invoke_subgraph) == 4


def test_overrides_reach_their_site(qkv):
    def twice(q, k, v):
        return causal(causal(q, k, v), k, v)

    gm = capture(twice, *qkv(Lq=L))
    config = CrispConfig(
        min_seqlen=128, overrides={0: {"policy": "streaming"}, 1: {"enabled": False}}
    )
    report = run_passes(gm, config)
    assert [(s.rewritten, s.policy) for s in report.sites] == [(True, "streaming"), (False, "")]


def test_the_scale_reaches_both_route_and_flex(qkv):
    gm = capture(lambda q, k, v: SDPA(q, k, v, is_causal=True, scale=0.3), *qkv(Hkv=4, Lq=L))
    run_passes(gm, CONFIG)
    (route,) = gm.graph.find_nodes(op="call_function", target=ROUTE)
    assert route.args[3] == pytest.approx(0.3)
    region = gm.crisp_flex_region
    (flex,) = region.graph.find_nodes(
        op="call_function", target=torch.ops.higher_order.flex_attention
    )
    assert flex.args[5] == pytest.approx(0.3)
    assert {user.target for user in flex.users} == {operator.getitem}


def test_later_sites_undo_the_repeat_of_shared_heads_too(qkv):
    """A flex_attention call in the graph writes to nothing, so K may be un-repeated behind it."""

    def twice(q, k, v):
        k, v = repeat_kv(q, k, v)
        once = SDPA(q, k, v, is_causal=True)
        return SDPA(once, k, v, is_causal=True)

    gm = capture(twice, *qkv(Lq=L))
    assert len(run_passes(gm, CONFIG).rewritten) == 2
    assert "reshape" not in [node.target for node in gm.graph.nodes]


@pytest.mark.parametrize("policy", ["bounded", "hybrid"])
def test_route_is_given_the_values_where_the_policy_reads_them(policy, qkv):
    inputs = qkv(Hq=4, Hkv=2, Lq=L)
    gm = capture(causal, *inputs)
    config = CrispConfig(min_seqlen=128, policy=policy)
    report = run_passes(gm, config)
    assert [site.policy for site in report.rewritten] == [policy]
    (route,) = gm.graph.find_nodes(op="call_function", target=ROUTE)
    if policy == "hybrid":
        assert "value" not in route.kwargs
        return
    assert route.kwargs["value"].args[0].name == "l_v_"
    seen = []
    with ops.watch(seen.append):
        gm(*inputs)
    assert torch.equal(seen[0].value, inputs[2])
    assert (seen[0].result[3][..., STAT_NAMES.index("multiple")] >= 0).all()
