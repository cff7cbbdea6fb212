"""Scenes of routing: block lists against float64 brute force, and what holds for all policies."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from crisp_flex.routing.geometry import partial_slots
from crisp_flex.routing.params import STAT_NAMES, RouteParams
from crisp_flex.routing.reference import route
from tests.masked_attention import listed
from tests.routing.inputs import params, structured
from tests.routing.oracle import DECISION_BUDGET, SCORE_BUDGET, solve
from tests.routing.scene import mask_of

POLICIES = (
    {"policy": "hybrid"},
    {"policy": "hybrid", "coverage": 0.6},
    {"policy": "hybrid", "coverage": 0.8, "coverage_reduce": "min", "audit_rows": 3},
    {"policy": "crisp", "k_min": 2},
    {"policy": "crisp", "router": "jsd", "max_uncovered": 1.0},
    {"policy": "crisp", "router": "pe", "gamma": 0.7, "max_uncovered": 1.0},
    {"policy": "crisp", "router": "vs", "max_uncovered": 1.0, "alpha": 2.0},
    {"policy": "streaming", "streaming_blocks": 2, "max_uncovered": 1.0},
    {"policy": "streaming", "streaming_blocks": 1, "max_uncovered": 0.3},
    {"policy": "dense"},
)
# Longer queries are not given to the brute force, whose loops would take most of the time.
BRUTE_FORCE_TOKENS = 64
# What makes a value of query or key special: none, all equal, zero, huge, NaN or Inf somewhere.
KINDS = (
    "structured",
    "structured",
    "structured",
    "equal keys",
    "zero queries",
    "huge",
    "nan",
    "inf",
)


@dataclass(frozen=True, slots=True)
class Scene:
    """One call of route."""

    query: torch.Tensor
    key: torch.Tensor
    key_valid: torch.Tensor | None
    params: RouteParams
    kind: str

    def __repr__(self):
        shapes = f"q{list(self.query.shape)} kv{list(self.key.shape)} {self.query.dtype}"
        valid = None if self.key_valid is None else self.key_valid.int().tolist()
        return f"Scene({self.kind}, {shapes}, key_valid={valid}, {self.params})"


@st.composite
def scenes(draw):
    """Short calls with small blocks, odd strides, any ratio of heads, padding and chunks."""
    B, Hkv = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    Hq = Hkv * draw(st.sampled_from([1, 1, 2, 3]))
    Lq = draw(st.integers(1, 40)) * draw(st.sampled_from([1, 1, 2, 4]))
    Lkv = Lq + draw(st.sampled_from([0, 0, 0, 1, 15, 40, 77]))
    D = draw(st.sampled_from([8, 16, 24]))
    block = draw(st.sampled_from([(16, 16), (16, 16), (16, 32), (32, 16), (64, 16)]))
    changes = {
        **draw(st.sampled_from(POLICIES)),
        "dense_last_blocks": draw(st.sampled_from([0, 1, 1, 3])),
    }
    seed, kind = draw(st.integers(0, 1 << 20)), draw(st.sampled_from(KINDS))
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.float16, torch.bfloat16]))
    query, key = structured(B, Hq, Hkv, Lq, Lkv, D, seed=seed, dtype=dtype)
    gen = torch.Generator().manual_seed(seed)
    query, key = spoiled(query, key, kind, gen)
    if draw(st.booleans()):  # [B, L, H, D] in memory, as a projection leaves it
        query, key = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key))
    if draw(st.booleans()):  # a slice of something wider
        query = torch.nn.functional.pad(query, (0, 5))[..., :D]
    known = params(D, block, **changes)
    return Scene(query, key, draw(key_masks(B, Lkv, gen)), known, kind)


@st.composite
def key_masks(draw, B, Lkv, gen):
    """[B, Lkv] bool or None: left, right, holes, a sequence without keys."""
    kind = draw(st.sampled_from(["none", "none", "left", "right", "holes", "empty"]))
    if kind == "none":
        return None
    tokens, pads = torch.arange(Lkv), torch.randint(0, Lkv, (B, 1), generator=gen)
    return {
        "left": tokens >= pads,
        "right": tokens < Lkv - pads,
        "holes": torch.rand(B, Lkv, generator=gen) > 0.4,
        "empty": (tokens >= 0) & (torch.arange(B)[:, None] > 0),
    }[kind]


def spoiled(query, key, kind, gen):
    """query and key with what kind says done to them."""
    if kind == "equal keys":
        key = key[:, :, :1].expand_as(key).contiguous()
    elif kind == "zero queries":
        query = torch.zeros_like(query)
    elif kind == "huge":
        query, key = (x.clamp(-10, 10) * 40 for x in (query, key))
    elif kind in ("nan", "inf"):
        for x in (query, key):
            count = max(x.shape[2] // 40, 1)
            at = torch.randint(0, x.shape[2], (count,), generator=gen)
            x[:, :1, at, :1] = float(kind)
    return query, key


def check(scene):
    """Assert what route promises of a scene; "compared" where the brute force decides it too."""
    query, key, key_valid, p = scene.query, scene.key, scene.key_valid, scene.params
    B, Hq, Lq, _ = query.shape
    Lkv = key.shape[2]
    result = route(query, key, key_valid, p)
    keep, partial, full = blocks(result, p, Lq, Lkv, key_valid)
    pairs = all_pairs(B, Lq, Lkv, key_valid)
    some, every = tiles(pairs, p, torch.any), tiles(pairs, p, torch.all)
    assert not (keep & ~some[:, None]).any(), "a block with nothing visible is listed"
    assert not (full & ~every[:, None]).any(), "a partial block is listed as full"
    assert not (partial & every[:, None]).any(), "a full block is listed as partial"
    assert torch.equal(keep.any(-1), some.any(-1)[:, None].expand(-1, Hq, -1)), "a row is empty"
    diagonal = diagonals(p, Lq, Lkv)
    at = diagonal[None, None, :, None].expand(B, Hq, -1, 1)
    kept_diagonal = keep.gather(-1, at)[..., 0]
    sees_diagonal = some[:, None].expand(-1, Hq, -1, -1).gather(-1, at)[..., 0]
    assert torch.equal(kept_diagonal, sees_diagonal), "a diagonal block is missing"
    if p.policy == "dense":
        assert torch.equal(keep, some[:, None].expand_as(keep))
    stats = result[3]
    assert stats.shape == (B, Hq, len(STAT_NAMES))
    assert not stats.isnan().any()
    assert torch.equal(stats[..., 0], keep.sum((-2, -1)).float())
    again = route(query, key, key_valid, p)
    assert all(map(torch.equal, result, again)), "a second run differs"
    alone = route(query[-1:], key[-1:], None if key_valid is None else key_valid[-1:], p)
    if scene.kind in ("nan", "inf"):
        _check_unread(scene, keep, some)
        return scene.kind
    last = blocks(alone, p, Lq, Lkv, key_valid)[0][0]
    return _compared(scene, keep, stats, last)


def _check_unread(scene, keep, some):
    """A head whose query or key is not finite keeps what is needed; other heads do not change."""
    clean = [x.nan_to_num(0.0, posinf=0.0, neginf=0.0) for x in (scene.query, scene.key)]
    G = scene.query.shape[1] // scene.key.shape[1]
    if scene.query.shape[1] == G:  # every head reads the one spoiled key head
        return
    result = route(*clean, scene.key_valid, scene.params)
    Lq, Lkv = scene.query.shape[2], scene.key.shape[2]
    want = blocks(result, scene.params, Lq, Lkv, scene.key_valid)[0]
    assert torch.equal(keep[:, G:], want[:, G:]), "a head without NaN changed"


def _compared(scene, keep, stats, last):
    """Against brute force, head by head, where no decision is closer than fp32 can tell."""
    known = scene.kind != "huge" and scene.query.dtype == torch.float32
    if not known or scene.query.shape[2] > BRUTE_FORCE_TOKENS:
        return "invariants only"
    heads = solve(scene.query, scene.key, scene.key_valid, scene.params)
    for b, row in enumerate(heads):
        for h, head in enumerate(row):
            assert stats[b, h, 1] == head.visible.sum()
            assert abs(stats[b, h, 2] - head.c_struct) < SCORE_BUDGET
            if head.margin < DECISION_BUDGET:
                continue
            want = torch.from_numpy(head.keep)
            assert torch.equal(keep[b, h], want), f"batch {b}, head {h}: blocks differ"
            if b == len(heads) - 1:
                assert torch.equal(last[h], want), f"head {h}: the last sequence alone differs"
    return "compared"


def blocks(result, p, Lq, Lkv, key_valid):
    """[B, Hq, Nq, Nkv] bool of all, the partial and the full lists, which ascend and are apart."""
    counts, buffer, full_counts, _ = result
    Nkv = -(-Lkv // p.block_kv)
    P = partial_slots(p.block_q, p.block_kv, Lq, Lkv, key_valid is not None)
    assert buffer.shape[-1] == P + Nkv
    lists = (counts, buffer[..., :Nkv]), (full_counts, buffer[..., P:])
    for count, indices in lists:
        assert count.dtype == indices.dtype == torch.int32
        slots = torch.arange(indices.shape[-1])
        used = slots < count[..., None]
        assert (count <= indices.shape[-1]).all(), "a count is out of bounds"
        assert ((indices >= 0) & (indices < Nkv))[used].all(), "an index is out of bounds"
        rising = indices[..., 1:] > indices[..., :-1]
        assert rising[used[..., 1:]].all(), "a list does not ascend"
    assert (counts <= P).all(), "partial blocks reach into the full list"
    partial, full = (listed(*x, Nkv) for x in lists)
    assert not (partial & full).any(), "a block is in both lists"
    return partial | full, partial, full


def all_pairs(B, Lq, Lkv, key_valid):
    """[B, Lq, Lkv] bool from loops over nothing but positions and the key mask."""
    valid = torch.ones(B, Lkv, dtype=torch.bool) if key_valid is None else key_valid
    return torch.stack([torch.as_tensor(mask_of(Lq, Lkv, row.numpy())) for row in valid])


def tiles(pairs, p, reduce):
    """[B, Nq, Nkv] of [B, Lq, Lkv]: reduce over each block."""
    rows = [reduce(x, dim=1) for x in pairs.split(p.block_q, 1)]
    rows = torch.stack(rows, 1)
    return torch.stack([reduce(x, dim=2) for x in rows.split(p.block_kv, 2)], 2)


def diagonals(p, Lq, Lkv):
    """[Nq] the key block that the last query of each query block stands in."""
    Nq = -(-Lq // p.block_q)
    last = (torch.arange(1, Nq + 1) * p.block_q).clamp(max=Lq) - 1 + Lkv - Lq
    return last // p.block_kv
