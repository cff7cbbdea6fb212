"""Queries and keys with NaN, Inf or flat values in them, one fault a head, and what is compared."""

import dataclasses

import torch

from crisp_flex.routing import reference
from crisp_flex.routing.guards import ROUTE_ESTIMATE
from crisp_flex.routing.kernels import dispatch
from crisp_flex.routing.params import STAT_NAMES
from tests.routing.inputs import params
from tests.routing.kernels.compare import MASS_BUDGET, check_route, kept
from tests.routing.kernels.compare_unaudited import check_unaudited

# Each keeps few blocks of a head without a fault (but for dense): one column has nearly all mass.
POLICIES = {
    "hybrid": {"policy": "hybrid", "coverage": 0.8, "audit_rows": 2},
    "hybrid min": {
        "policy": "hybrid", "coverage": 0.8, "audit_rows": 2, "coverage_reduce": "min",
    },
    "estimate": {"policy": "crisp", "router": "pe", "gamma": 0.5},
    "c_struct": {"policy": "crisp", "alpha": 2.0, "k_min": 1},
    "jsd": {"policy": "crisp", "router": "jsd", "gamma": 0.5, "alpha": 2.0, "k_min": 1},
    "lines": {"policy": "crisp", "router": "vs", "alpha": 2.0, "k_min": 1},
    "streaming": {"policy": "streaming", "streaming_blocks": 1, "max_uncovered": 1.0},
    "dense": {"policy": "dense"},
}  # fmt: skip


def _put(where, at, value):
    """A fault: value in element 3 of the query ("q") or key ("k") at this share of the length."""

    def edit(q, k):
        x = q if where == "q" else k
        x[int(at * x.shape[0]), 3] = value

    return edit


def _last_but(tokens, value):
    """A fault: value in a query this far before the end."""

    def edit(q, k):
        q[-tokens, 3] = value

    return edit


def _sign(q, k):
    """A fault: an Inf that every query gives the logit -Inf, so that no exact row shows it."""
    q[:, 3] = -q[:, 3].abs() - 0.1
    k[int(0.3 * k.shape[0]), 3] = torch.inf


def _equal_keys(q, k):
    k[:] = k[-1]


def _zero_queries(q, k):
    q[:] = 0


def _huge(q, k):
    """Finite in fp16, as the logits are not."""
    q[:], k[:] = ((6000 * x).clamp(-6e4, 6e4) for x in (q, k))


# name: edit(q, k) of one head's q and k [L, D], in place
FAULTS = {
    "none": lambda q, k: None,
    # neither audited nor a proxy row
    "NaN query": _put("q", 0.7, torch.nan),
    "Inf query": _put("q", 0.7, torch.inf),
    "-Inf query": _put("q", 0.7, -torch.inf),
    # a proxy row, in a block that is not audited
    "NaN proxy query": _last_but(100, torch.nan),
    "Inf proxy query": _last_but(100, torch.inf),
    "NaN last query": _last_but(1, torch.nan),
    "-Inf last query": _last_but(1, -torch.inf),
    "NaN key": _put("k", 0.3, torch.nan),
    "Inf key": _put("k", 0.3, torch.inf),
    "-Inf key": _put("k", 0.3, -torch.inf),
    "NaN last key": _put("k", 0.999, torch.nan),
    "Inf key of no mass": _sign,
}
# ties, where rounding alone may decide
FLAT = {"equal keys": _equal_keys, "zero queries": _zero_queries, "huge": _huge}


def heads(faults, L, D, dtype, device):
    """query, key [1, len(faults), L, D]: a column that all look at, and a fault in each head."""
    gen = torch.Generator().manual_seed(1)
    query, key = torch.randn(2, 1, len(faults), L, D, generator=gen)
    query[..., 0] += 6
    key[:, :, 0, 0] += 2.7 * D**0.5
    for h, name in enumerate(faults):
        (FAULTS | FLAT)[name](query[0, h], key[0, h])
    return query.to(device, dtype), key.to(device, dtype)


def check_faults(
    policy, faults, *, L, D=16, block=(64, 64), dtype=torch.float32, device="cpu", key_valid=None
):
    """Assert that the kernels do with faults what the reference does; returns which are whole.

    A head is whole if it keeps all blocks that its rows see.
    """
    query, key = heads(faults, L, D, dtype, device)
    settings = params(D, block, dense_last_blocks=0, **POLICIES[policy])
    check = check_route if settings.policy == "hybrid" else check_unaudited
    keep = check(query, key, key_valid, settings) > 0
    visible = torch.ones_like(keep[0, 0]).tril()  # block sizes are equal, and nothing is masked
    if policy in ("hybrid", "hybrid min", "estimate"):
        # the row of such a query keeps all it sees, as no row of a head without a fault does
        row = int(0.7 * L) // block[0]
        for h, name in enumerate(faults):
            if name in ("none", "NaN query", "Inf query", "-Inf query"):
                assert torch.equal(keep[0, h, row], visible[row]) == (name != "none"), name
    return (keep == visible).all((-2, -1))[0].tolist()


def check_flat(policy, faults, *, L, D=16, block=(64, 64), dtype=torch.float16, device="cpu"):
    """Assert that the kernels keep what the reference keeps of flat heads, and as much mass.

    Of heads whose pooled map decides only the mass is compared: which of its equal entries pass,
    all, none or some, is the rounding of sums.
    """
    query, key = heads(faults, L, D, dtype, device)
    settings = params(D, block, dense_last_blocks=0, **POLICIES[policy])
    settings = dataclasses.replace(settings, k_min=0)
    got, want = (f(query, key, None, settings) for f in (dispatch.route, reference.route))
    assert got[3].isfinite().all()
    Nkv = -(-L // block[1])
    got_kept, want_kept = (kept(x, Nkv) > 0 for x in (got, want))
    (got_mass, got_route), (want_mass, want_route) = (
        (x[3][..., STAT_NAMES.index("coverage")], x[3][..., STAT_NAMES.index("route")])
        for x in (got, want)
    )
    assert torch.equal(got_route, want_route)
    by_map = want_route == ROUTE_ESTIMATE
    missing = want_kept & ~got_kept & ~by_map[..., None, None]
    assert missing.nonzero().tolist() == []
    if settings.policy != "hybrid":
        assert torch.equal(got_kept[~by_map], want_kept[~by_map])
    assert (got_mass > want_mass - torch.where(by_map, 0.01, MASS_BUDGET)).all()
