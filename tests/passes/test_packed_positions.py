"""Documents packed by position_ids alone: read as indices, and only where that is what they say."""

import pytest
import torch
from mask_meaning import B, L, read
from masked_attention import relative_error

from crisp_flex.passes.pipeline import run_passes
from tests.families.cells import CONFIG
from tests.families.models import LENGTH, ids, make


def joined(*documents):
    """[sum of lengths] positions; a document is (first position, length)."""
    return torch.cat([torch.arange(start, start + length) for start, length in documents])


# of one token, joined without a step back, with a gap, with a step of 0
FIRST, SECOND = joined((0, 4), (0, 1), (0, 7)), joined((3, 2), (7, 4), (10, 3), (0, 3))
POSITIONS = torch.stack([FIRST, SECOND])


def starts(positions):
    """Ids as transformers counts them."""
    return (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)


def at(x, b, i):
    """x[b, i] over [B, 1, L, 1] or [B, 1, 1, L], as transformers loads it."""
    return x[b[:, None, None, None], i]


def mask_of(order, ids_of=starts):
    """A mask that allows order(p[q], p[k]) among equal ids."""

    def build(query, key, positions):
        b, i = torch.arange(B), torch.arange(L)
        q, k = i[None, None, :, None], i[None, None, None, :]
        positions = positions.expand(B, -1)
        found = ids_of(positions)
        allowed = order(at(positions, b, q), at(positions, b, k))
        return allowed & (at(found, b, q) == at(found, b, k))

    return build


READ = {
    "causal": (lambda q, k: k <= q, starts, "causal + documents"),
    "strict, the other way round": (lambda q, k: q > k, starts, "causal + offset -1 + documents"),
    "window": (lambda q, k: (k > q - 3) & (k <= q), starts, "causal + window 3 + documents"),
    "counted in int32": (
        lambda q, k: k <= q,
        lambda p: (torch.diff(p, dim=1, prepend=p[:, :1] - 1) != 1).cumsum(1, dtype=torch.int32),
        "causal + documents",
    ),
    "counted as numbers": (
        lambda q, k: k <= q,
        lambda p: torch.cumsum((~(torch.diff(p, prepend=p[:, :1]) == 1)).long(), dim=-1),
        "causal + documents",
    ),
    "shifted": (lambda q, k: k <= q, lambda p: starts(p + 7), "causal + documents"),
}


@pytest.mark.parametrize("given", [POSITIONS, FIRST[None]], ids=["a row each", "one row"])
@pytest.mark.parametrize(("order", "ids_of", "reading"), READ.values(), ids=READ)
def test_positions_become_indices(order, ids_of, reading, given):
    """`read` compares with the mask itself, element by element."""
    assert read(mask_of(order, ids_of), given).describe() == reading


NOT_READ = {
    # ends where a position is 0: a jump in the middle of a document goes unseen
    "by zeros": lambda p: (p == 0).cumsum(-1),
    "by steps back": lambda p: (torch.diff(p, prepend=p[:, :1] - 1) < 0).cumsum(-1),
    "by steps of 2": lambda p: (torch.diff(p, prepend=p[:, :1] - 1) != 2).cumsum(-1),
    "by second differences": lambda p: (torch.diff(p, 2, prepend=p[:, :2] - 1) != 1).cumsum(-1),
    "of every other position": lambda p: starts(2 * p),
    "of other positions": lambda p: starts(p.flip(1)),
    "of the other row": lambda p: starts(p).flip(0),
    "sums that come back": lambda p: (torch.diff(p, prepend=p[:, :1] - 1) - 1).cumsum(-1),
    "along the batch": lambda p: (torch.diff(p, prepend=p[:, :1] - 1) != 1).cumsum(0),
    "times": lambda p: (torch.diff(p, prepend=p[:, :1] - 1) != 1).cumsum(-1) // 2,
}


@pytest.mark.parametrize("ids_of", NOT_READ.values(), ids=NOT_READ)
def test_other_ids_leave_positions_as_they_are(ids_of):
    spec = read(mask_of(lambda q, k: k <= q, ids_of), POSITIONS)
    assert not spec.causal
    assert spec.other


def test_an_order_of_other_numbers_is_not_read():
    orders = (lambda q, k: k <= 2 * q, lambda q, k: 2 * k <= 2 * q + 1, lambda q, k: -k <= q)
    for order in orders:
        torch._dynamo.reset()
        spec = read(mask_of(order), POSITIONS)
        assert not spec.causal
        assert spec.other


LENGTHS = (41, 1, LENGTH - 42)
PACKED = joined(*((0, length) for length in LENGTHS))


@pytest.mark.parametrize("family", ["Gemma 3 text", "Qwen2.5-VL text"])
def test_a_packed_prompt_gives_each_document_its_own_logits(family):
    """Qwen2.5-VL takes the positions of text in front of those of time, height and width."""
    policies = []

    def backend(gm, example_inputs):
        policies.extend(site.policy for site in run_passes(gm, CONFIG).sites)
        return gm.forward

    model, rows = make(family), 4 if family == "Qwen2.5-VL text" else 1
    packed = PACKED.expand(rows, 1, -1) if rows > 1 else PACKED[None]
    call = {"input_ids": ids(), "position_ids": packed, "use_cache": False}
    with torch.no_grad():
        whole = model(**call)[0]
        got = torch.compile(model, backend=backend)(**call)[0]
        alone = [model(input_ids=x, use_cache=False)[0] for x in ids().split(LENGTHS, dim=1)]
    assert policies == ["segments", "segments"]
    assert relative_error(got, whole) < 1e-5
    assert relative_error(got, torch.cat(alone, 1)) < 1e-5
