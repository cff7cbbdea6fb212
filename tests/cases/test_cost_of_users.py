"""Time and memory: short prompts (B06), long ones (B08), many layers (B16), any head dim (B17).

What shows without a GPU: what a graph holds and how large the tensors are that selection makes.
Milliseconds and bytes of a device are in test_gpu_cost_of_users.py.
"""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import crisp_flex
from crisp_flex import CrispConfig, Reason, gpu_table, torch_internals
from crisp_flex.passes.pipeline import run_passes
from tests.cases.peaky import Sdpa, dense, qkv
from tests.families.models import ids, make


def captured(model, *args, config, **kwargs):
    """What run_passes makes of the graph of model: its graph module and its report."""
    found = []

    def backend(gm, example_inputs):
        found.append((gm, run_passes(gm, config)))
        return gm.forward

    with torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True)(*args, **kwargs)
    return found[0]


@pytest.mark.parametrize("n", [1, 7, 100, 512, 2048])
def test_b06_below_min_seqlen_the_graph_is_the_models_own(n):
    q, k, v = qkv(Hq=2, Lq=n, D=16)
    gm, report = captured(Sdpa(is_causal=True), q, k, v, config=CrispConfig())
    reason = Reason.DECODE if n == 1 else Reason.TOO_SHORT
    assert [site.rejection.reason for site in report.rejected] == [reason]
    calls = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    assert calls == [F.scaled_dot_product_attention]
    with torch.no_grad():
        assert torch.equal(gm(q, k, v)[0], dense(q, k, v, is_causal=True))


def test_b06_the_length_is_settable_and_stands_in_the_table_of_each_gpu():
    q, k, v = qkv(Hq=2, Lq=512, D=16)
    for least, sparse in ((513, 0), (512, 1)):
        config = CrispConfig(min_seqlen=least)
        assert len(captured(Sdpa(is_causal=True), q, k, v, config=config)[1].rewritten) == sparse
        torch._dynamo.reset()
    assert all(gpu.min_seqlen >= 1 and gpu.min_seqlen_evidence for gpu in gpu_table.GPUS.values())


class Largest(TorchDispatchMode):
    """The most elements that any tensor had that was made while this was active."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor) and x.numel():
                # strides of 0 take no memory
                spans = [(n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)]
                self.elements = max(self.elements, sum(spans) + 1)
        return out


POLICIES = {
    "hybrid": {"policy": "hybrid"},
    "crisp": {"policy": "crisp"},
    "crisp pe": {"policy": "crisp", "router": "pe"},
    "streaming": {"policy": "streaming"},
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
def test_b08_selection_makes_no_tensor_of_queries_times_keys(policy, padded):
    L, H, D, block = 8192, 2, 16, 64
    q, k, _ = qkv(Hq=H, Lq=L, D=D)
    valid = torch.arange(L).expand(1, -1) >= 1000 if padded else None
    config = CrispConfig(block_size=(block, block), **POLICIES[policy])
    with Largest() as largest:
        crisp_flex.route(q, k, config, key_valid=valid)
    table = H * math.ceil(L / block) ** 2
    exact_rows = H * 128 * L  # of the last queries, against all keys
    assert largest.elements <= max(2 * table + 2 * H * L, exact_rows, q.numel())
    assert largest.elements < L * L / 8


def test_b08_the_graph_holds_no_mask_of_queries_times_keys():
    model = make("Llama")
    x = ids()
    config = CrispConfig(min_seqlen=32, block_size=(16, 16))
    kwargs = {"input_ids": x, "attention_mask": torch.ones_like(x), "use_cache": False}
    gm, report = captured(model, config=config, **kwargs)
    assert len(report.rewritten) == 2
    L = x.shape[1]
    shapes = [
        tuple(node.meta["example_value"].shape)
        for node in gm.graph.nodes
        if isinstance(node.meta.get("example_value"), torch.Tensor)
    ]
    assert shapes
    assert not [shape for shape in shapes if shape[-2:] == (L, L)]


def test_b16_layers_that_are_alike_are_compiled_once():
    config = CrispConfig(min_seqlen=32, block_size=(16, 16))
    model = make("Llama", num_hidden_layers=4)
    gm, report = captured(model, config=config, input_ids=ids(), use_cache=False)
    assert len(report.rewritten) == 4
    region = torch_internals.INVOKE_SUBGRAPH
    calls = gm.graph.find_nodes(op="call_function", target=region)
    assert len(calls) == 4
    assert len({call.args[0].target for call in calls}) == 1


@pytest.mark.parametrize("D", [1, 4, 8, 24, 72, 192, 256, 257, 264, 512])
def test_b17_every_head_dim_runs_sparse_or_dense(D, without_inductor):
    inputs = qkv(Hq=2, Lq=128, D=D)
    config = CrispConfig(min_seqlen=64, block_size=(64, 64), policy="dense")
    model = crisp_flex.compile(Sdpa(is_causal=True), config)
    with warnings.catch_warnings():
        warnings.simplefilter("error", crisp_flex.FallbackWarning)
        got = model(*inputs)
    torch.testing.assert_close(got, dense(*inputs, is_causal=True), atol=1e-5, rtol=1e-5)
    (report,) = crisp_flex.reports(model)
    reasons = [site.rejection.reason for site in report.rejected]
    assert reasons == ([] if 8 <= D <= 256 else [Reason.HEAD_DIM])
