"""lift_mask on masks that load tensors: padding, offsets, and in-place writes to either."""

import pytest
import torch
from mask_meaning import B, L, columns, pad, read, rows
from torch import nn


def vmapped(offset=0):
    """A mask by torch.vmap over scalar indices, as transformers 4.5x builds it."""

    def build(q, k, valid):
        valid = valid.bool()

        def allowed(b, h, i, j):
            return (j <= i) & torch.ops.aten.index(valid, [b, j])

        for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None)):
            allowed = torch.vmap(allowed, in_dims=dims)
        allowed = torch.vmap(allowed, in_dims=(0, None, None, None))
        j = torch.arange(k.shape[2])
        j += 0
        i = torch.arange(q.shape[2]) + offset
        return allowed(torch.arange(valid.shape[0]), torch.arange(1), i, j)

    return build


def indexed(offset=0, window=None, past=0, to_bool=True):
    """A mask by broadcast indices, as transformers 5.x builds it."""

    def build(q, k, valid):
        valid = valid.to(device="cpu", dtype=torch.bool) if to_bool else valid
        b = torch.arange(q.shape[0])[:, None, None, None]
        i = (torch.arange(q.shape[2]) + offset)[None, None, :, None]
        j = (torch.arange(k.shape[2]) + past)[None, None, None, :]
        mask = i.new_ones((), dtype=torch.bool)
        if window is not None:
            mask = mask & (j > i - window).to("cpu")
        mask = mask & (j <= i)
        return (mask & valid[b, j]).expand(q.shape[0], -1, q.shape[2], k.shape[2])

    return build


PADDED = {
    "indexed": indexed(),
    "indexed ints": lambda q, k, valid: indexed()(q, k, valid),
    "vmap": vmapped(),
    "bool view": lambda q, k, v: (columns(k) <= rows(q)) & v.bool()[:, None, None, :],
    "unsqueezed": lambda q, k, v: (columns(k) <= rows(q)) & v.bool().unsqueeze(1).unsqueeze(2),
    "expanded": lambda q, k, v: (
        (columns(k) <= rows(q)) & v.bool()[:, None, None].expand(-1, 4, q.shape[2], -1)
    ),
    "not equal 0": lambda q, k, v: (columns(k) <= rows(q)) & (v != 0)[:, None, None, :],
    "not equal 0 late": lambda q, k, v: (columns(k) <= rows(q)) & (v[:, None, None, :] != 0),
    "equal 1": lambda q, k, v: (columns(k) <= rows(q)) & (v == 1)[:, None, None, :],
    "not padded": lambda q, k, v: (columns(k) <= rows(q)) & ~(v == 0)[:, None, None, :],
    "two masks as one": lambda q, k, v: (
        (columns(k) <= rows(q)) & (v.bool() | (v > 7))[:, None, None, :]
    ),
}


@pytest.mark.parametrize("build", PADDED.values(), ids=PADDED)
@pytest.mark.parametrize("dynamic", [None, True])
def test_causal_and_left_padding(build, dynamic):
    spec = read(build, pad(), dynamic=dynamic)
    assert spec.describe() == "causal + padding"
    assert spec.is_plain_causal
    assert spec.padding[0].per_batch


def test_one_row_of_padding_for_the_whole_batch():
    valid = pad(batch=1)
    spec = read(lambda q, k, v: (columns(k) <= rows(q)) & v.bool()[:, None, None, :], valid)
    assert spec.is_plain_causal
    assert not spec.padding[0].per_batch


NOT_PADDING = {
    "row of another sequence": lambda q, k, v: v.bool()[1][None, None, None, :],
    "by query": lambda q, k, v: v.bool()[:, None, :, None],
    "by batch": lambda q, k, v: v.bool()[:, :1, None, None],
    "batch flipped": lambda q, k, v: v.bool()[
        1 - torch.arange(B)[:, None, None, None], columns(k)[None, None]
    ],
    "reversed keys": lambda q, k, v: v.bool()[
        torch.arange(B)[:, None, None, None], L - 1 - columns(k)[None, None]
    ],
    "wrapped keys": lambda q, k, v: v.bool()[
        torch.arange(B)[:, None, None, None], columns(k)[None, None] - 3
    ],
    "other truth": lambda q, k, v: (
        v.double()
        .mul(0.5)
        .long()
        .bool()[:, None, None, :]
        .expand(-1, -1, q.shape[2], -1)
        .logical_not()
    ),
    "of rank 4": lambda q, k, v: v.view(B, 1, 1, L).bool() & v.bool()[:, None, :, None],
}


@pytest.mark.parametrize("build", NOT_PADDING.values(), ids=NOT_PADDING)
def test_loads_that_are_not_padding_by_key(build):
    spec = read(lambda q, k, v: (columns(k) <= rows(q)) & build(q, k, v), pad())
    assert spec.other
    assert not spec.is_plain_causal


WHOLE = {
    "modulo": lambda q, k, v: (columns(k) % 2 == 0).expand(q.shape[2], -1),
    "late keys": lambda q, k, v: (columns(k) >= 2).expand(q.shape[2], -1),
    "batch flipped": lambda q, k, v: v.bool()[1 - torch.arange(B)][:, None, None, :],
    "reversed keys": lambda q, k, v: v.bool()[:, L - 1 - torch.arange(L)][:, None, None, :],
    "wrapped keys": lambda q, k, v: v.bool()[:, torch.arange(L) - 3][:, None, None, :],
    "some padding counts": lambda q, k, v: (v * torch.arange(L) > 7)[:, None, None, :],
}


@pytest.mark.parametrize("build", WHOLE.values(), ids=WHOLE)
def test_a_key_mask_that_is_not_understood_is_loaded_as_it_is(build):
    spec = read(lambda q, k, v: (columns(k) <= rows(q)) & build(q, k, v), pad())
    assert spec.is_plain_causal
    assert spec.padding[0].source.op != "placeholder"


def test_padding_from_a_later_key():
    build = lambda q, k, v: (columns(k) <= rows(q)) & v[:, 4:].bool()[:, None, None, :]  # noqa: E731
    spec = read(build, pad(length=L + 4))
    assert spec.padding[0].kv_offset == 4
    assert not spec.other
    assert not spec.is_plain_causal


def test_two_paddings_are_not_plain():
    def build(q, k, v, w):
        return (columns(k) <= rows(q)) & v.bool()[:, None, None, :] & w.bool()[:, None, None, :]

    spec = read(build, pad(), pad().flip(1))
    assert len(spec.padding) == 2
    assert not spec.is_plain_causal


def test_padding_that_ends_before_the_keys_is_a_limit():
    def build(q, k, v):
        longer = nn.functional.pad(v.bool(), (0, k.shape[2] - v.shape[1]))
        return (columns(k) <= rows(q)) & longer[:, None, None, :]

    spec = read(build, pad(length=9))
    assert spec.kv_limit == 9
    assert len(spec.padding) == 1
    assert not spec.other
    assert not spec.is_plain_causal


def test_padding_with_true_is_loaded_as_it_is():
    def build(q, k, v):
        longer = nn.functional.pad(v.bool(), (0, k.shape[2] - v.shape[1]), value=True)
        return (columns(k) <= rows(q)) & longer[:, None, None, :]

    # the padded tensor as a whole is a 2-D mask of its own
    spec = read(build, pad(length=9))
    assert spec.kv_limit is None
    assert spec.padding[0].source.name == "longer"


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("window", [None, 4])
def test_a_chunk_after_past_tokens(window, dynamic):
    spec = read(indexed(offset=6, window=window), pad(length=L), Lq=L - 6, dynamic=dynamic)
    assert spec.causal
    assert spec.q_offset == 6
    assert spec.window == window
    assert len(spec.padding) == 1
    assert not spec.other
    assert not spec.is_plain_causal


def test_a_symbolic_offset_keeps_its_node():
    def build(q, k, past):
        return columns(k) <= rows(q) + past

    spec = read(build, 5, Lq=L - 5, dynamic=True)
    ((symbol, node),) = spec.symbols
    assert spec.q_offset == symbol
    assert node.op == "placeholder"


def test_an_offset_in_a_tensor_is_a_symbol():
    spec = read(lambda q, k, past: columns(k) <= rows(q) + past.to("cpu"), torch.tensor(5))
    assert spec.causal
    assert not spec.is_plain_causal
    assert not spec.volatile


def test_a_counter_that_is_bumped_later_is_volatile():
    def build(q, k, past):
        mask = columns(k) <= rows(q) + past.to("cpu")
        past.add_(q.shape[2])
        return mask

    spec = read(build, torch.tensor(5))
    assert spec.volatile
    assert not spec.other


def test_a_counter_that_is_bumped_before_is_other():
    def build(q, k, past):
        past.add_(2)
        return columns(k) <= rows(q) + past.to("cpu")

    assert read(build, torch.tensor(5)).other


def test_padding_that_is_written_later_is_not_plain():
    def build(q, k, v):
        mask = (columns(k) <= rows(q)) & v.bool()[:, None, None, :]
        v.mul_(2)
        return mask

    spec = read(build, pad())
    assert spec.volatile
    assert not spec.is_plain_causal


def test_writes_elsewhere_do_not_matter():
    def build(q, k, cache):
        cache.add_(1)
        q.relu_()
        return columns(k) <= rows(q)

    assert read(build, torch.zeros(3)).is_plain_causal
