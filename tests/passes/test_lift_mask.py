"""lift_mask on hand-written masks of positions: what it reads is checked element by element."""

import operator

import pytest
import torch
from mask_meaning import L, columns, read, record_mask, rows

from crisp_flex.passes.lift_mask import lift_mask


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


def test_the_graph_is_left_as_it_was():
    graph, mask, _ = record_mask(PLAIN["built up in place"])
    before = str(graph)
    lift_mask(mask)
    assert str(graph) == before


@pytest.mark.parametrize("op", [operator.le, operator.gt])
def test_a_spec_says_what_it_is(op):
    spec = read(lambda q, k: op(columns(k), rows(q) - 2))
    assert spec.describe() == ("causal + offset -2" if op is operator.le else "window 2")
