"""dead_nodes: pure producers go, everything with an effect or a reader stays."""

import torch
from torch import fx, nn

from crisp_flex.passes.dead_nodes import ancestors, erase_dead_ancestors

SDPA = nn.functional.scaled_dot_product_attention


def capture(fn, *inputs):
    graphs = []

    def backend(gm, example_inputs):
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(fn, backend=backend, fullgraph=True)(*inputs)
    return graphs[-1]


def without_mask(gm):
    """Drop the mask of the one SDPA call; returns the nodes it was built from."""
    (site,) = gm.graph.find_nodes(op="call_function", target=SDPA)
    candidates = ancestors(site.kwargs["attn_mask"])
    site.update_kwarg("attn_mask", None)
    return candidates


def names(gm):
    return [node.name for node in gm.graph.nodes]


def qkv():
    return torch.randn(1, 2, 8, 4)


def test_ancestors_are_the_node_and_what_it_is_computed_from():
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    doubled = graph.call_function(torch.add, (x, x))
    graph.call_function(torch.add, (y, y))
    assert ancestors(doubled) == {x, doubled}


def test_a_mask_that_nobody_reads_goes():
    def attend(x, valid):
        i = torch.arange(x.shape[2])
        i += 0
        mask = (i[None, :] <= i[:, None]) & valid.bool()[:, None, None, :]
        return SDPA(x, x, x, attn_mask=mask.expand(1, -1, 8, 8))

    gm = capture(attend, qkv(), torch.ones(1, 8))
    candidates = without_mask(gm)
    erased = erase_dead_ancestors(gm.graph, candidates)
    gm.graph.lint()
    assert [node.op for node in gm.graph.nodes if node.op != "placeholder"] == [
        "call_function",
        "output",
    ]
    assert erased == len([node for node in candidates if node.op != "placeholder"])


def test_a_mask_with_another_reader_stays():
    def attend(x):
        i = torch.arange(x.shape[2])
        mask = i[None, :] <= i[:, None]
        return SDPA(x, x, x, attn_mask=mask), mask

    gm = capture(attend, qkv())
    candidates = without_mask(gm)
    before = names(gm)
    assert erase_dead_ancestors(gm.graph, candidates) == 0
    assert names(gm) == before


def test_in_place_updates_without_users_stay():
    def attend(x, counter, cache):
        mask = torch.arange(8)[None, :] <= torch.arange(8)[:, None] + counter
        cache.index_copy_(2, torch.arange(8), x)
        counter.add_(8)
        return SDPA(x, x, x, attn_mask=mask)

    gm = capture(attend, qkv(), torch.tensor(0), torch.zeros(1, 2, 8, 4))
    erased = erase_dead_ancestors(gm.graph, set(gm.graph.nodes) & (without_mask(gm)))
    everything = erase_dead_ancestors(gm.graph, set(gm.graph.nodes))
    assert erased > 0
    assert everything == 0
    targets = {node.target for node in gm.graph.nodes}
    assert {"index_copy_", "add_"} <= targets


def test_an_in_place_add_on_an_input_stays():
    def attend(x, counter):
        position = counter.view(1)
        position += 1
        return SDPA(x, x, x, attn_mask=torch.arange(8)[None, :] < position[:, None])

    gm = capture(attend, qkv(), torch.tensor([5]))
    erase_dead_ancestors(gm.graph, without_mask(gm))
    (add,) = [node for node in gm.graph.nodes if "iadd" in str(node.target)]
    assert not add.users


def test_random_numbers_stay():
    def attend(x):
        return SDPA(x, x, x, attn_mask=torch.rand(8, 8) > 0.5)

    gm = capture(attend, qkv())
    erase_dead_ancestors(gm.graph, without_mask(gm))
    assert torch.rand in {node.target for node in gm.graph.nodes}


def test_only_candidates_go():
    def attend(x):
        unused = x + 1  # noqa: F841
        i = torch.arange(x.shape[2])
        return SDPA(x, x, x, attn_mask=i[None, :] <= i[:, None])

    gm = capture(attend, qkv())
    candidates = without_mask(gm)
    others = [node for node in gm.graph.nodes if node not in candidates]
    erase_dead_ancestors(gm.graph, candidates)
    assert [node for node in gm.graph.nodes if node in others] == others
