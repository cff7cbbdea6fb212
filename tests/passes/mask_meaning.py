"""What a MaskSpec means, written without the lifter; shared by the tests of lift_mask."""

import sympy
import torch
from sympy.core.function import AppliedUndef
from torch import nn

from crisp_flex.passes.lift_mask import lift_mask
from crisp_flex.passes.mask_formula import INDICES, K, Q

SDPA = nn.functional.scaled_dot_product_attention
B, L = 2, 12


class Attention(nn.Module):
    """SDPA under a mask that build(query, key, *inputs) makes in the graph."""

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


def record(fn, *args, dynamic=None, **kwargs):
    """The one graph of fn(*args), its SDPA nodes, and what its nodes gave."""
    found = []

    def backend(gm, example_inputs):
        def run(*inputs):
            recorder = Recorder(gm)
            out = recorder.run(*inputs)
            found.append((gm.graph, recorder.seen))
            return out

        return run

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic)(*args, **kwargs)
    ((graph, seen),) = found
    return graph, graph.find_nodes(op="call_function", target=SDPA), seen


def number(expr, spec, seen):
    """The value that an expression of spec had in a recorded run."""
    known = {symbol: int(seen[node]) for symbol, node in spec.symbols}
    for node, value in seen.items():  # sizes
        example = node.meta.get("example_value")
        if isinstance(example, torch.SymInt):
            known.setdefault(example.node.expr, int(value))
    return int(sympy.sympify(expr).xreplace(known))


def meaning(spec, seen, shape):
    """The mask of the given shape (B, Hq, Lq, Lkv) that the fields of spec describe."""
    _, _, Lq, Lkv = shape
    q, k = torch.arange(Lq)[:, None], torch.arange(Lkv)[None, :]
    offset = number(spec.q_offset, spec, seen)
    mask = torch.ones(shape, dtype=torch.bool)
    if spec.causal:
        mask &= k <= q + offset
    if spec.window is not None:
        mask &= k > q + offset - number(spec.window, spec, seen)
    if spec.kv_limit is not None:
        mask &= k < number(spec.kv_limit, spec, seen)
    for same in spec.same:
        mask &= (
            _ids(same.of_query, spec, same, seen, shape)[:, None, :, None]
            == (_ids(same.of_key, spec, same, seen, shape)[:, None, None, :])
        )
    for load in spec.padding:
        source = seen[load.source] != 0
        assert source.dim() == 2
        assert load.per_batch or source.shape[0] == 1
        start = number(load.kv_offset, spec, seen)
        columns = source[:, start : start + Lkv]
        mask &= nn.functional.pad(columns, (0, Lkv - columns.shape[1]))[:, None, None, :]
    return mask


def _ids(expr, spec, same, seen, shape):
    """[B, L] the ids that an expression of b and of q or k has, element by element."""
    rows, of_query = shape[0], Q in expr.free_symbols
    loaded = {name: seen[node] for name, node in same.sources}

    def at(b, position):
        found = expr.xreplace({INDICES[0]: sympy.Integer(b), Q: position, K: position})
        while loads := found.atoms(AppliedUndef):
            load = next(x for x in loads if not any(y.atoms(AppliedUndef) for y in x.args))
            found = found.xreplace({load: sympy.Integer(int(loaded[str(load.func)][load.args]))})
        return number(found.subs({x: int(y) for x, y in loaded.items() if not y.dim()}), spec, seen)

    length = shape[2] if of_query else shape[3]
    return torch.tensor([[at(b, sympy.Integer(i)) for i in range(length)] for b in range(rows)])


def is_exact(spec):
    """Whether spec claims to be the whole mask, and not just a part of it."""
    return not (spec.other or spec.by_position)


def record_mask(build, *inputs, Lq=L, Lkv=L, dynamic=None):
    """record for an SDPA call under the mask build(query, key, *inputs); the mask's node too."""
    query, key = torch.randn(B, 4, Lq, 8), torch.randn(B, 4, Lkv, 8)
    graph, (site,), seen = record(Attention(build), query, key, *inputs, dynamic=dynamic)
    return graph, site.kwargs["attn_mask"], seen


def read(build, *inputs, Lq=L, Lkv=L, dynamic=None):
    """The reading, checked against the real mask: exactly, or as a necessary condition."""
    _, mask, seen = record_mask(build, *inputs, Lq=Lq, Lkv=Lkv, dynamic=dynamic)
    spec = lift_mask(mask)
    real = seen[mask]
    if real.dtype != torch.bool:
        if spec.other:
            return spec
        real = real == 0
    real = real.expand(B, real.shape[-3] if real.dim() > 2 else 1, Lq, Lkv)
    claimed = meaning(spec, seen, real.shape)
    if is_exact(spec):
        assert torch.equal(real, claimed)
    else:
        assert not (real & ~claimed).any(), "a claimed condition is not necessary"
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
