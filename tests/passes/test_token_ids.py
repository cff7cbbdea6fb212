"""Packed documents and chunks of positions: the rewritten graph gives what the mask gave."""

import pytest
import torch
import torch.nn.functional as F
from graphs import large_masks, repeat_kv, targets
from masked_attention import relative_error

from crisp_flex import CrispConfig, Reason
from crisp_flex.passes.pipeline import run_passes

L = 320
CONFIG = CrispConfig(min_seqlen=128, block_size=(64, 64))


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


def qkv(Lq=L, Lkv=L):
    gen = torch.Generator().manual_seed(3)
    shapes = ((2, 4, Lq, 16), (2, 2, Lkv, 16), (2, 2, Lkv, 16))
    return tuple(torch.randn(shape, generator=gen) for shape in shapes)


def packed():
    """[2, L] documents; numbers of the second sequence come back, are negative and far apart."""
    tokens = torch.arange(L)
    return torch.stack([tokens // 90, (tokens // 50 % 3 - 1) * 2**40])


def left():
    """[2] tokens of padding in front."""
    return torch.tensor([0, 37])


def attend(allowed):
    """SDPA under the causal mask and allowed(b, q, k, *inputs), as transformers writes masks."""

    def fn(query, key, value, *inputs):
        b = torch.arange(query.shape[0])[:, None, None, None]
        q = (torch.arange(query.shape[2]) + key.shape[2] - query.shape[2])[None, None, :, None]
        k = torch.arange(key.shape[2])[None, None, None, :]
        mask = ((k <= q) & allowed(b, q, k, *inputs)).expand(query.shape[0], -1, -1, -1)
        return F.scaled_dot_product_attention(query, *repeat_kv(query, key, value), attn_mask=mask)

    return fn


def behind_padding(b, q, k, padding):
    return (k - padding[b]) // 64 == (q - padding[b]) // 64


def one_row(b, q, k, ids):
    return ids[q] == ids[k]


def with_padding(b, q, k, ids, valid):
    return (ids[b, q] == ids[b, k]) & valid.bool()[b, k]


def with_window(b, q, k, ids):
    return (ids[b, q] == ids[b, k]) & (k > q - 100)


def rewrite(fn, *given, dynamic=None):
    """fn(*given) as the rewritten graph gives it, the graph, and its one kind of site.

    The eager operator reads no lists: what is compared is the masks.
    """
    found = []

    def backend(gm, example_inputs):
        found.append((gm, run_passes(gm, CONFIG).sites))
        return gm.forward

    out = torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic)(*given)
    ((gm, sites),) = found
    assert len({(site.policy, site.rejection) for site in sites}) == 1
    return out, gm, sites[0]


VALID = (torch.arange(L) >= left()[:, None]).long()
MASKS = {
    "documents": (lambda b, q, k, ids: ids[b, q] == ids[b, k], (packed(),)),
    "documents of int32": (lambda b, q, k, ids: ids[b, k] == ids[b, q], (packed().int(),)),
    "one row of documents": (one_row, (packed()[1],)),
    "documents and padding": (with_padding, (packed(), VALID)),
    "documents and a window": (with_window, (packed(),)),
    "two tensors": (lambda b, q, k, x, y: x[b, q] == y[b, k], (packed(), packed().roll(20, 1))),
    "chunks": (lambda b, q, k: k // 96 == q // 96, ()),
    "chunks behind padding": (behind_padding, (left(),)),
    "shifted chunks": (lambda b, q, k: (k + 5) // 96 == (q + 5) // 96, ()),
}


@pytest.mark.parametrize("Lq", [L, 200], ids=["prompt", "chunk"])
@pytest.mark.parametrize(("allowed", "inputs"), MASKS.values(), ids=MASKS)
def test_the_graph_gives_what_the_mask_gave(allowed, inputs, Lq):
    fn, given = attend(allowed), (*qkv(Lq=Lq), *inputs)
    got, gm, site = rewrite(fn, *given)
    want = fn(*given)
    assert site.policy == "segments", site.rejection
    assert large_masks(gm, L) == []
    visible = want.isfinite().all(-1) & (want != 0).any(-1)
    assert visible.float().mean() > 0.5
    assert relative_error(got[visible], want[visible]) < 2e-6


def test_one_chunk_is_plain_and_a_longer_chunk_of_positions_is_a_window():
    def site_of(size):
        torch._dynamo.reset()  # else the second size would be a symbol
        _, gm, site = rewrite(attend(lambda b, q, k: k // size == q // size), *qkv())
        calls = gm.graph.find_nodes(
            op="call_function", target=torch.ops.crisp_flex.segments.default
        )
        return site.policy, [call.args[5] for call in calls]

    assert site_of(L) == ("hybrid", [])
    assert site_of(96) == ("segments", [96])


def test_layers_share_ids_and_lists():
    def layers(q, k, v, ids):
        tokens = torch.arange(L)
        mask = (tokens <= tokens[:, None]) & (ids[:, None, :, None] == ids[:, None, None])
        k, v = repeat_kv(q, k, v)
        for _ in range(3):
            q = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return q

    _, gm, site = rewrite(layers, *qkv(), packed())
    assert site.policy == "segments"
    target = torch.ops.crisp_flex.segments.default
    assert len(gm.graph.find_nodes(op="call_function", target=target)) == 1


def test_ids_that_are_written_later_are_read_where_the_mask_stood():
    def fn(q, k, v, ids):
        tokens = torch.arange(L)
        mask = (tokens <= tokens[:, None]) & (ids[:, None, :, None] == ids[:, None, None, :])
        ids.mul_(0)
        return F.scaled_dot_product_attention(q, *repeat_kv(q, k, v), attn_mask=mask)

    got, _, site = rewrite(fn, *qkv(), packed())
    assert site.policy == "segments"
    assert relative_error(got, fn(*qkv(), packed())) < 2e-6


REFUSED = {
    "by head": lambda b, q, k, ids: ids[b, q] == ids[torch.arange(4)[None, :, None, None] // 2, k],
    "not equal": lambda b, q, k, ids: ids[b, q] != ids[b, k],
    "of floats": lambda b, q, k, ids: ids.double()[b, q] == ids.double()[b, k],
    "of query and key at once": lambda b, q, k, ids: ids[b, q] == ids[b, k] + q - k,
    "of the key only": lambda b, q, k, ids: ids[b, k] == 1,
    "some document": lambda b, q, k, ids: (ids[b, q] == ids[b, k]) | (ids[b, k] == 0),
    "written before": lambda b, q, k, ids: ids[b, q] == ids.add_(1)[b, k],
}


@pytest.mark.parametrize("allowed", REFUSED.values(), ids=REFUSED)
def test_what_is_no_id_of_a_token_stays_dense(allowed):
    _, gm, site = rewrite(attend(allowed), *qkv(), packed())
    assert site.rejection.reason is Reason.MASK_UNREAD
    assert F.scaled_dot_product_attention in targets(gm)


def test_dynamic_lengths_are_refused_on_the_cpu():
    _, _, site = rewrite(attend(MASKS["documents"][0]), *qkv(), packed(), dynamic=True)
    assert site.rejection.reason is Reason.CPU_DYNAMIC_PADDING
