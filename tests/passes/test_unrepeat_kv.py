"""unrepeat_kv: forms of repeat_kv with query heads grouped by KV head, and what looks alike."""

import pytest
import torch
from torch import nn

from crisp_flex.passes.unrepeat_kv import unrepeat_kv

SDPA = nn.functional.scaled_dot_product_attention
B, HKV, G, L, D = 2, 2, 3, 8, 4


def capture(repeat_key, repeat_value=None, shape=(B, HKV, L, D)):
    """The nodes of the repeated k * 2 and v * 3, which the graph returns."""
    repeat_value = repeat_value or repeat_key
    graphs = []

    def backend(gm, example_inputs):
        graphs.append(gm.graph)
        return gm.forward

    def repeat(k, v):
        return repeat_key(k * 2), repeat_value(v * 3)

    torch._dynamo.reset()
    torch.compile(repeat, backend=backend, fullgraph=True)(torch.randn(shape), torch.randn(shape))
    ((key, value),) = graphs[-1].output_node().args
    return key, value


def repeat_kv(x):
    x = x[:, :, None, :, :].expand(x.shape[0], x.shape[1], G, x.shape[2], x.shape[3])
    return x.reshape(x.shape[0], -1, x.shape[3], x.shape[4])


FORMS = {
    "repeat_kv": repeat_kv,
    "short index": lambda x: x[:, :, None].expand(-1, -1, G, -1, -1).flatten(1, 2),
    "ellipsis": lambda x: x[..., None, :, :].expand(-1, -1, G, -1, -1).flatten(1, 2),
    "unsqueeze": lambda x: x.unsqueeze(2).expand(-1, -1, G, -1, -1).reshape(-1, HKV * G, L, D),
    "unsqueeze from the end": lambda x: x.unsqueeze(-3).expand(-1, -1, G, -1, -1).flatten(1, 2),
    "contiguous": lambda x: repeat_kv(x).contiguous(),
    "method": lambda x: x.repeat_interleave(G, dim=1),
    "method, dim from the end": lambda x: x.repeat_interleave(G, -3),
    "function": lambda x: torch.repeat_interleave(x, repeats=G, dim=1),
}


@pytest.mark.parametrize("repeat", FORMS.values(), ids=FORMS)
def test_repeats_are_undone(repeat):
    key, value = capture(repeat)
    plain_key, plain_value, repeats = unrepeat_kv(key, value)
    assert repeats == G
    assert (plain_key.args[1], plain_value.args[1]) == (2, 3)  # k * 2 and v * 3


def test_mixed_forms_of_the_same_repeat_are_undone():
    key, value = capture(FORMS["repeat_kv"], FORMS["method"])
    assert unrepeat_kv(key, value)[2] == G


def test_one_head_and_one_sequence():
    key, value = capture(lambda x: repeat_kv(x[:, :1]), shape=(1, HKV, L, D))
    assert unrepeat_kv(key, value)[2] == G


OTHER = {
    "repeat": lambda x: x.repeat(1, G, 1, 1),
    "expanded before the heads": lambda x: x[:, None].expand(-1, G, -1, -1, -1).flatten(1, 2),
    "unsqueezed before the heads": lambda x: (
        x.unsqueeze(1).expand(-1, G, -1, -1, -1).reshape(B, HKV * G, L, D)
    ),
    "transposed before merging": lambda x: (
        x[:, :, None].expand(-1, -1, G, -1, -1).transpose(1, 2).flatten(1, 2)
    ),
    "tokens repeated": lambda x: x.repeat_interleave(G, dim=2),
    "other order of tokens": lambda x: (
        x.transpose(1, 2)
        .reshape(B, HKV, L, D)[:, :, None]
        .expand(-1, -1, G, -1, -1)
        .flatten(1, 2)
        .roll(1, 2)
    ),
    "concatenated": lambda x: torch.cat([x] * G, dim=1),
    "counts in a tensor": lambda x: x.repeat_interleave(
        torch.tensor([4, 2]), dim=1, output_size=HKV * G
    ),
    "not repeated": lambda x: x,
    "once": lambda x: x.repeat_interleave(1, dim=1),
    "slice after": lambda x: x.repeat_interleave(2 * G, dim=1)[:, : HKV * G],
}


@pytest.mark.parametrize("repeat", OTHER.values(), ids=OTHER)
def test_other_orders_of_heads_are_left_alone(repeat):
    key, value = capture(repeat)
    assert unrepeat_kv(key, value) == (key, value, 1)


def test_both_must_repeat():
    key, value = capture(FORMS["repeat_kv"], lambda x: x.repeat(1, G, 1, 1))
    assert unrepeat_kv(key, value) == (key, value, 1)
    assert unrepeat_kv(value, key) == (value, key, 1)


def test_both_must_repeat_alike():
    key, value = capture(
        lambda x: x.repeat_interleave(G, dim=1),
        lambda x: x[:, :1].repeat_interleave(HKV * G, dim=1),
    )
    assert unrepeat_kv(key, value) == (key, value, 1)


def test_a_cache_that_is_written_after_the_repeat_is_left_alone():
    def written(x):
        repeated = repeat_kv(x)
        x.add_(1)
        return repeated

    key, value = capture(written)
    assert unrepeat_kv(key, value) == (key, value, 1)


def test_a_repeat_that_is_written_to_is_left_alone():
    def written(x):
        repeated = repeat_kv(x)
        repeated.mul_(2)
        return repeated

    key, value = capture(written)
    assert unrepeat_kv(key, value) == (key, value, 1)


def test_a_cache_that_is_written_before_the_repeat_is_fine():
    def written(x):
        x.add_(1)
        return repeat_kv(x)

    key, value = capture(written)
    assert unrepeat_kv(key, value)[2] == G


def test_symbolic_lengths():
    graphs = []

    def backend(gm, example_inputs):
        graphs.append(gm.graph)
        return gm.forward

    def attend(query, k, v):
        return SDPA(query, repeat_kv(k), repeat_kv(v))

    torch._dynamo.reset()
    query, k = torch.randn(B, HKV * G, L, D), torch.randn(B, HKV, L, D)
    v = torch.randn(B, HKV, L, D)
    for x in (query, k, v):
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(x, 2)
    torch.compile(attend, backend=backend, fullgraph=True)(query, k, v)
    (site,) = graphs[-1].find_nodes(op="call_function", target=SDPA)
    key, value = site.args[1:]
    assert isinstance(key.meta["example_value"].shape[2], torch.SymInt)
    plain_key, plain_value, repeats = unrepeat_kv(key, value)
    assert repeats == G
    assert {plain_key.op, plain_value.op} == {"placeholder"}
    assert plain_key is not plain_value
