"""B34: what the fake of every operator of crisp_flex promises is what the operator gives.

Batch above 1, lengths that are no multiple of a block, and arguments as a fused projection leaves
them in memory: where fake and real strides differ, compiled results are noise.
"""

import pytest
import torch
from torch.library import opcheck

import crisp_flex.huggingface_op  # noqa: F401  (registers an operator)
from crisp_flex import CrispConfig
from crisp_flex.routing.params import RouteParams

B, Hq, Hkv, L, D, BLOCK = 2, 4, 2, 77, 16, 32


def views():
    """query, key, value [B, H, L, D]: views of one [B, L, (Hq + 2 Hkv) D]."""
    fused = torch.randn(B, L, (Hq + 2 * Hkv) * D)
    parts = fused.split([Hq * D, Hkv * D, Hkv * D], -1)
    return [x.unflatten(-1, (-1, D)).transpose(1, 2) for x in parts]


def arguments():
    """Per operator of crisp_flex what makes its positional arguments."""
    q, k, v = views()
    valid = torch.arange(L).expand(B, L) >= torch.tensor([[0], [20]])
    params = RouteParams.from_config(CrispConfig(block_size=(BLOCK, BLOCK)), D=D).as_args()
    mask = torch.ones(1, 1, L, L, dtype=torch.bool).tril()
    ids = (torch.arange(L) // 30).expand(B, L)
    counts, out = torch.ones(B, Hq, 3, dtype=torch.int32), torch.empty_like(q)
    return {
        "attention": lambda: (q, k, v, mask, torch.randn(Hq), False, 0.3, 5.0),
        "check_uncovered": lambda: (counts, torch.rand(B, Hq, 7), 1.0, "warn", "here", "so"),
        "query_offset": lambda: (q, k),
        "realize": lambda: (q,),
        "route": lambda: (q, k, valid, *params),
        "route_after": lambda: (out, q, k, valid, *params),
        "segments": lambda: (q, k, valid, ids, ids, None, BLOCK, BLOCK),
        "window": lambda: (q, k, valid, 40, BLOCK, BLOCK),
        "write_heads": lambda: (out, q[:, 1:3], 2),
        "write_last_rows": lambda: (out, q, k, v, 0.3, BLOCK, 1),
    }


@pytest.mark.parametrize("name", arguments())
def test_b34_fake_and_real_results_agree(name):
    operator = getattr(torch.ops.crisp_flex, name).default
    # a policy may read the values; the others are given them, too
    named = {"value": views()[2]} if name.startswith("route") else {}
    opcheck(operator, arguments()[name](), named, test_utils=("test_schema", "test_faketensor"))


def test_b34_no_operator_is_left_out():
    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    ours = {name.removeprefix("crisp_flex::") for name in names if name.startswith("crisp_flex::")}
    assert ours == set(arguments())
