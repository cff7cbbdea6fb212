"""lift_mask on hand-written masks: every reading that claims something is checked element by element."""

import operator

import pytest
import sympy
import torch
from torch import nn

from crisp_flex.passes.lift_mask import lift_mask
from crisp_flex.passes.mask_spec import MaskSpec

SDPA = nn.functional.scaled_dot_product_attention
B, L = 2, 12


class Attention(nn.Module):
    """SDPA under a mask that build(query, *inputs) makes in the graph."""

    def __init__(self, build):
        super().__init__()
        self.build = build

    def forward(self, query, key, *inputs):
        return SDPA(query, key, key, attn_mask=self.build(query, key, *inputs))


class Recorder(torch.fx.Interpreter):
    """Runs a graph and keeps what each node gave, as it was at that moment."""

    def __init__(self, gm):
        super().__init__(gm)
        self.seen = {}

    def run_node(self, n):
        result = super().run_node(n)
        self.seen[n] = result.clone() if isinstance(result, torch.Tensor) else result
        return result


def capture(build, *inputs, Lq=L, Lkv=L, dynamic=None):
    """The graph, its mask node, and what its nodes gave."""
    found = []

    def backend(gm, example_inputs):
        def run(*args):
            recorder = Recorder(gm)
            out = recorder.run(*args)
            found.append((gm.graph, recorder.seen))
            return out

        return run

    query, key = torch.randn(B, 4, Lq, 8), torch.randn(B, 4, Lkv, 8)
    torch.compile(Attention(build), backend=backend, fullgraph=True, dynamic=dynamic)(
        query, key, *inputs
    )
    (graph, seen), *rest = found
    assert not rest
    (site,) = graph.find_nodes(op="call_function", target=SDPA)
    return graph, site.kwargs["attn_mask"], seen


def number(expr, spec, seen):
    """The value of an expression of a spec."""
    nodes = dict(spec.symbols)
    known = {symbol: int(seen[node]) for symbol, node in nodes.items()}
    for node, value in seen.items():  # sizes
        example = node.meta.get("example_value")
        if isinstance(example, torch.SymInt):
            known.setdefault(example.node.expr, int(value))
    return int(sympy.sympify(expr).xreplace(known))


def meaning(spec: MaskSpec, seen, Lq, Lkv):
    """The mask that the fields of a spec describe, (B, 1, Lq, Lkv): written without the lifter."""
    q, k = torch.arange(Lq)[:, None], torch.arange(Lkv)[None, :]
    offset = number(spec.q_offset, spec, seen)
    mask = torch.ones(B, 1, Lq, Lkv, dtype=torch.bool)
    if spec.causal:
        mask &= k <= q + offset
    if spec.window is not None:
        mask &= k > q + offset - number(spec.window, spec, seen)
    if spec.kv_limit is not None:
        mask &= k < number(spec.kv_limit, spec, seen)
    for load in spec.padding:
        source = seen[load.source] != 0
        assert source.dim() == 2
        assert source.shape[0] == (B if load.per_batch else 1)
        start = number(load.kv_offset, spec, seen)
        columns = source[:, start : start + Lkv]
        columns = nn.functional.pad(columns, (0, Lkv - columns.shape[1]))
        mask &= columns[:, None, None, :]
    return mask


def read(build, *inputs, Lq=L, Lkv=L, dynamic=None):
    """The reading, checked against the real mask: exactly, or as a necessary condition."""
    torch._dynamo.reset()
    _, mask, seen = capture(build, *inputs, Lq=Lq, Lkv=Lkv, dynamic=dynamic)
    spec = lift_mask(mask)
    real = seen[mask]
    if real.dtype != torch.bool:
        assert spec.other
        return spec
    real = real.expand(B, real.shape[-3] if real.dim() > 2 else 1, Lq, Lkv)
    claimed = meaning(spec, seen, Lq, Lkv).expand_as(real)
    if spec.other or spec.chunk or spec.documents or spec.by_position:
        assert not (real & ~claimed).any(), "a claimed condition is not necessary"
    else:
        assert torch.equal(real, claimed)
    return spec


def rows(x):
    return torch.arange(x.shape[2])[:, None]


def columns(x):
    return torch.arange(x.shape[2])[None, :]


def pad(batch=B, length=L):
    """Left padding of different lengths, int64."""
    valid = torch.ones(batch, length, dtype=torch.long)
    valid[0, :5] = 0
    return valid


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


def in_place_build_up(q, k):
    i = torch.arange(q.shape[2])
    i += 0
    mask = i[None, :] <= i[:, None]
    mask &= torch.full((q.shape[2], q.shape[2]), True)
    return mask[None, None]


PLAIN = {
    "compare": lambda q, k: columns(k) <= rows(q),
    "compare reversed": lambda q, k: rows(q) >= columns(k),
    "compare strict": lambda q, k: columns(k) < rows(q) + 1,
    "functional": lambda q, k: torch.le(columns(k), rows(q)),
    "int32": lambda q, k: columns(k).int() <= rows(q).int(),
    "not greater": lambda q, k: ~(columns(k) > rows(q)),
    "both shifted": lambda q, k: columns(k) + 7 <= rows(q) + 7,
    "transposed": lambda q, k: (columns(k) >= rows(q)).transpose(0, 1),
    "mT": lambda q, k: (columns(k) >= rows(q)).mT,
    "permuted": lambda q, k: (columns(k) >= rows(q)).permute(1, 0)[None],
    "view": lambda q, k: (columns(k) <= rows(q)).view(1, 1, q.shape[2], k.shape[2]),
    "expanded": lambda q, k: (columns(k) <= rows(q)).expand(q.shape[0], 1, -1, -1),
    "all heads": lambda q, k: (columns(k) <= rows(q)).expand(q.shape[0], 4, -1, -1),
    "twice": lambda q, k: (columns(k) <= rows(q)) & (rows(q) >= columns(k)),
    "times": lambda q, k: (columns(k) <= rows(q)) * torch.ones(1, 1, dtype=torch.bool),
    "logical and": lambda q, k: torch.logical_and(columns(k) <= rows(q), rows(q) >= 0),
    "tril": lambda q, k: torch.tril(torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)),
    "tril method of floats": lambda q, k: torch.ones(q.shape[2], k.shape[2]).tril().bool(),
    "tril == 1": lambda q, k: torch.tril(torch.ones(q.shape[2], k.shape[2])) == 1,
    "tril > 0": lambda q, k: torch.tril(torch.ones(q.shape[2], k.shape[2])).long() > 0,
    "not triu": lambda q, k: (
        ~torch.triu(torch.ones(q.shape[2], k.shape[2], dtype=torch.bool), diagonal=1)
    ),
    "triu logical_not": lambda q, k: torch.ones(q.shape[2], k.shape[2]).triu(1).logical_not(),
    "triu == 0": lambda q, k: torch.triu(torch.ones(q.shape[2], k.shape[2]), 1) == 0,
    "triu transposed": lambda q, k: torch.ones(q.shape[2], k.shape[2]).bool().triu().T,
    "tril view and slice": lambda q, k: (
        torch.ones(32, 32).bool().tril().view(1, 1, 32, 32)[:, :, : q.shape[2], : k.shape[2]]
    ),
    "built up in place": in_place_build_up,
    "wide window": lambda q, k: (columns(k) <= rows(q)) & (columns(k) > rows(q) - 4096),
    "or false": lambda q, k: (columns(k) <= rows(q)) | torch.zeros(L, 1, dtype=torch.bool),
}


@pytest.mark.parametrize("build", PLAIN.values(), ids=PLAIN)
def test_forms_of_the_plain_causal_mask(build):
    spec = read(build)
    assert spec.is_plain_causal
    assert spec.describe() == "causal"


@pytest.mark.parametrize("build", [PLAIN["compare"], PLAIN["tril"], PLAIN["view"]])
def test_plain_causal_with_symbolic_sizes(build):
    assert read(build, dynamic=True).is_plain_causal


# spec fields other than the default of each mask that is read to the end, but is not plain causal
READ = {
    "offset": (lambda q, k: columns(k) <= rows(q) + 3, {"causal": True, "q_offset": 3}),
    "strictly before": (lambda q, k: columns(k) < rows(q), {"causal": True, "q_offset": -1}),
    "tril with diagonal": (
        lambda q, k: torch.ones(q.shape[2], k.shape[2]).tril(2).bool(),
        {"causal": True, "q_offset": 2},
    ),
    "window": (
        lambda q, k: (columns(k) <= rows(q)) & (columns(k) > rows(q) - 4),
        {"causal": True, "window": 4},
    ),
    "window by triu": (
        lambda q, k: torch.ones(q.shape[2], k.shape[2]).bool().tril().triu(-3),
        {"causal": True, "window": 4},
    ),
    "window and offset": (
        lambda q, k: (columns(k) <= rows(q) + 2) & (columns(k) > rows(q) + 2 - 4),
        {"causal": True, "q_offset": 2, "window": 4},
    ),
    "anti-causal": (lambda q, k: columns(k) >= rows(q), {"window": 1}),
    "limit": (lambda q, k: (columns(k) < 9).expand(q.shape[2], -1), {"kv_limit": 9}),
    "stepped rows": (
        lambda q, k: (columns(k) <= torch.arange(30)[:, None])[3 : 3 + q.shape[2]],
        {"causal": True, "q_offset": 3},
    ),
    "last rows": (
        lambda q, k: (columns(k) <= torch.arange(16)[:, None])[-q.shape[2] :],
        {"causal": True, "q_offset": 4},
    ),
    "last rows of few": (
        lambda q, k: (columns(k) <= rows(q))[-4 * L :],
        {"causal": True},
    ),
    "all true": (lambda q, k: torch.ones(q.shape[2], k.shape[2], dtype=torch.bool), {}),
    "all true by comparison": (lambda q, k: columns(k) <= rows(q) + k.shape[2], {}),
    "all true of rank 4": (lambda q, k: torch.full((1, 1, 1, 1), True), {}),
}


@pytest.mark.parametrize(("build", "fields"), READ.values(), ids=READ)
def test_masks_that_are_read(build, fields):
    spec = read(build)
    found = {"causal": spec.causal, "q_offset": spec.q_offset, "window": spec.window}
    found |= {"kv_limit": spec.kv_limit}
    default = {"causal": False, "q_offset": 0, "window": None, "kv_limit": None}
    assert found == default | fields
    assert not spec.other
    assert spec.is_plain_causal == (fields == {"causal": True})


def setitem(q, k):
    mask = columns(k) <= rows(q)
    mask[0, 5] = True
    return mask


def setitem_through_a_view(q, k):
    mask = columns(k) <= rows(q)
    mask[2].fill_(True)
    return mask


def setitem_on_positions(q, k):
    i = torch.arange(q.shape[2])
    mask_rows = i[:, None]
    i += 1
    return columns(k) <= mask_rows


def out_argument(q, k):
    i, j = torch.arange(q.shape[2]), torch.arange(k.shape[2])
    torch.add(i, 2, out=i)
    return j[None, :] <= i[:, None]


def masked_fill_on_the_side(q, k):
    mask = columns(k) <= rows(q)
    mask.logical_or_(columns(k) == 3)
    return mask


def inplace_functional(q, k):
    i = torch.arange(q.shape[2]) - 3
    nn.functional.relu(i, True)
    return columns(k) <= i[:, None]


NOT_READ = {
    "or": lambda q, k: (columns(k) <= rows(q)) | (columns(k) == 0),
    "or of two causal": lambda q, k: (columns(k) <= rows(q)) | (columns(k) <= rows(q) + 1),
    "xor": lambda q, k: (columns(k) <= rows(q)) ^ (columns(k) == 0),
    "where": lambda q, k: torch.where(columns(k) <= rows(q), True, columns(k) == 0),
    "not of and": lambda q, k: ~((columns(k) <= rows(q)) & (columns(k) > 2)),
    "diagonal": lambda q, k: columns(k) == rows(q),
    "without diagonal": lambda q, k: (columns(k) <= rows(q)) & (columns(k) != rows(q) - 1),
    "float positions": lambda q, k: columns(k).float() <= rows(q).float(),
    "int8 positions": lambda q, k: columns(k).to(torch.int8) <= rows(q).to(torch.int8),
    "float bound": lambda q, k: columns(k) <= rows(q) + 0.5,
    "additive": lambda q, k: torch.zeros(q.shape[2], k.shape[2]).masked_fill(
        columns(k) > rows(q), float("-inf")
    ),
    "strided": lambda q, k: (columns(k) <= torch.arange(2 * q.shape[2])[:, None])[::2],
    "flipped": lambda q, k: (columns(k) <= rows(q)).flip(1),
    "rolled": lambda q, k: (columns(k) <= rows(q)).roll(1, 0),
    "doubled": lambda q, k: 2 * columns(k) <= rows(q),
    "modulo": lambda q, k: (columns(k) <= rows(q)) & (rows(q) % 2 == 0),
    "two offsets": lambda q, k: (columns(k) <= rows(q)) & (columns(k) <= rows(q) + 2),
    "two windows": lambda q, k: (columns(k) > rows(q) - 4) & (columns(k) > rows(q) - 5),
    "zeros": lambda q, k: torch.zeros(q.shape[2], k.shape[2], dtype=torch.bool),
    "per head": lambda q, k: columns(k) <= rows(q) + torch.arange(4)[:, None, None],
    "late queries": lambda q, k: (columns(k) <= rows(q)) & (rows(q) >= 2),
    "wrapped index": lambda q, k: (columns(k) <= rows(q))[torch.arange(q.shape[2]) - 5],
    "wraps in int32": lambda q, k: columns(k).int() + (2**31 - 6) <= rows(q).int(),
    "sorted": lambda q, k: columns(k) < rows(q) - rows(q).sort(0, descending=True)[0],
    "reshaped": lambda q, k: (columns(k) <= rows(q)).reshape(2, -1).reshape(L, L).T.reshape(L, L),
    "setitem": setitem,
    "fill of a view": setitem_through_a_view,
    "positions changed": setitem_on_positions,
    "out argument": out_argument,
    "logical_or_": masked_fill_on_the_side,
    "inplace relu": inplace_functional,
}


@pytest.mark.parametrize("build", NOT_READ.values(), ids=NOT_READ)
def test_what_is_not_understood_is_other(build):
    spec = read(build)
    assert spec.other
    assert not spec.is_plain_causal
    assert "other" in spec.describe()


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


def test_packed_documents():
    def build(q, k, position):
        document = (torch.diff(position, prepend=position[:, :1] - 1, dim=-1) != 1).cumsum(-1)
        same = document[:, None, :, None] == document[:, None, None, :]
        return (columns(k) <= rows(q)) & same

    position = torch.cat([torch.arange(5), torch.arange(L - 5)])[None].expand(B, -1).contiguous()
    spec = read(build, position)
    assert spec.documents
    assert spec.causal
    assert not spec.is_plain_causal


@pytest.mark.parametrize("start", [0, 3])
def test_one_document_counted_from_arange_folds_away(start):
    def build(q, k):
        position = (torch.arange(q.shape[2]) + start)[None]
        document = (torch.diff(position, prepend=position[:, :1] - 1, dim=-1) != 1).cumsum(-1)
        same = document[:, None, :, None] == document[:, None, None, :]
        return (columns(k) <= rows(q)) & same

    assert read(build).is_plain_causal


def test_a_jump_in_positions_does_not_fold_away():
    def build(q, k):
        position = (2 * torch.arange(q.shape[2]))[None]
        document = (torch.diff(position, prepend=position[:, :1] - 1, dim=-1) != 1).cumsum(-1)
        same = document[:, None, :, None] == document[:, None, None, :]
        return (columns(k) <= rows(q)) & same

    assert not read(build).is_plain_causal


def test_chunked_attention():
    build = lambda q, k: (columns(k) <= rows(q)) & (columns(k) // 4 == rows(q) // 4)  # noqa: E731
    spec = read(build)
    assert spec.chunk
    assert spec.causal
    assert not spec.is_plain_causal


def test_causal_by_a_tensor_of_positions():
    spec = read(lambda q, k, position: columns(k) <= position[:, None], torch.arange(L))
    assert spec.by_position
    assert not spec.causal
    assert not spec.is_plain_causal


def test_a_vmap_over_an_unknown_op_is_not_read():
    def build(q, k):
        def allowed(i, j):
            return j <= i.bitwise_xor(1)

        inner = torch.vmap(allowed, in_dims=(None, 0))
        return torch.vmap(inner, in_dims=(0, None))(
            torch.arange(q.shape[2]), torch.arange(k.shape[2])
        )

    spec = read(build)
    assert spec.other
    assert spec.kv_limit is None


@pytest.mark.parametrize("valid", [torch.ones(B, 1, L, L).bool(), torch.ones(B, 1, 1, L).bool()])
def test_a_mask_that_is_an_input_is_other(valid):
    assert read(lambda q, k, mask: mask, valid).other


def test_a_long_chain_ends_as_other():
    def build(q, k):
        mask = columns(k) <= rows(q)
        late = columns(k) > 100
        for _ in range(101):
            mask = mask | late
        return mask

    assert read(build).other


def test_the_graph_is_left_as_it_was():
    torch._dynamo.reset()
    graph, mask, _ = capture(indexed(), pad())
    before = str(graph)
    lift_mask(mask)
    assert str(graph) == before


@pytest.mark.parametrize("op", [operator.le, operator.gt])
def test_a_spec_says_what_it_is(op):
    spec = read(lambda q, k: op(columns(k), rows(q) - 2))
    assert spec.describe() == ("causal + offset -2" if op is operator.le else "window 2")
