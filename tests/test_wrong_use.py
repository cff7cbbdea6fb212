"""Wrong use of a model: one sentence each, in the error, warning or advice, with the fix."""

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.exc import BackendCompilerFailed

import crisp_flex
from crisp_flex import ConfigError, CrispConfig, InputError, torch_internals

CONFIG = CrispConfig(min_seqlen=32, block_size=(16, 16), policy="dense")


class Attention(torch.nn.Module):
    """Causal attention with dropout while it trains."""

    def forward(self, q):
        dropout = 0.1 if self.training else 0.0
        return F.scaled_dot_product_attention(q, q, q, dropout_p=dropout, is_causal=True)


@pytest.fixture
def as_it_is(monkeypatch):
    monkeypatch.setattr(torch_internals, "compile_with_inductor", lambda gm, *_: gm.forward)


def q_of(dtype=torch.float32):
    return torch.zeros(1, 2, 64, 16, dtype=dtype)


@pytest.mark.parametrize(
    ("model", "q", "says", "advice"),
    [
        (
            Attention().train(),
            q_of(),
            "dropout is on (dropout_p=0.1), q[1, 2, 64, 16]",
            "call model.eval(), or set dropout to 0",
        ),
        (
            Attention().eval(),
            q_of(torch.float64),
            "the dtype is not float32, float16 or bfloat16 (torch.float64)",
            "load the model in bfloat16",
        ),
        (
            Attention().eval(),
            q_of().requires_grad_(),
            "gradients are needed; the sparse path is for inference",
            "call it under torch.no_grad()",
        ),
    ],
    ids=["training", "float64", "gradients"],
)
def test_a_call_that_stays_dense_says_why_and_what_to_do(model, q, says, advice):
    found = crisp_flex.explain(model, q, config=CONFIG)
    line = str(found).splitlines()[1]
    assert f"left dense: {says}" in line
    assert line.endswith(f"; do: {advice}")
    assert [call["advice"] for call in found.to_dict()["calls"]] == [advice]


def test_a_dtype_that_no_kernel_takes_names_those_that_they_take():
    q = q_of(torch.float64)
    for call in (crisp_flex.route, lambda q, k: crisp_flex.sparse_attention(q, k, k)):
        with pytest.raises(InputError) as raised:
            call(q, q)
        assert str(raised.value) == (
            "query, key and value must share float32, float16 or bfloat16; got torch.float64, "
            "torch.float64, torch.float64"
        )


@pytest.mark.parametrize("backend", ["flash", "triton"])
def test_a_cuda_kernel_on_the_cpu_is_warned_of_and_explained(as_it_is, backend):
    config = CrispConfig(min_seqlen=32, policy="dense", backend=backend)
    says = (
        f'backend="{backend}" changes nothing on the CPU, which has one kernel: move the model '
        'with model.to("cuda"), or leave backend out'
    )
    model = crisp_flex.compile(Attention().eval(), config)
    with torch.no_grad():
        with pytest.warns(UserWarning, match=backend) as warned:
            model(q_of())
        assert [str(w.message) for w in warned] == [f"crisp_flex: {says}"]
        assert says in str(crisp_flex.explain(model, q_of()))
        assert says not in str(crisp_flex.explain(model, q_of(), config=CONFIG))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"preset": "quick"}, "preset must be one of fast, balanced, accurate, got 'quick'"),
        ({"policy": "hybird"}, "policy must be one of hybrid, crisp, streaming, dense, "),
        ({"min_seq_len": 128}, "unknown option 'min_seq_len': neither a field of CrispConfig ("),
        ({"coverage": 2}, "coverage must be in (0, 1], got 2"),
    ],
    ids=["preset", "policy", "option", "value"],
)
def test_an_option_by_name_is_refused_in_one_sentence(options, says):
    model = torch.compile(Attention().eval(), backend="crisp_flex", options=options)
    with torch.no_grad(), pytest.raises(BackendCompilerFailed) as raised:
        model(q_of())
    error = raised.value.inner_exception
    assert isinstance(error, ConfigError)
    assert str(error).startswith(says)
    assert "\n" not in str(error)
    assert says in str(raised.value)
