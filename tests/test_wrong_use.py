"""Wrong use of a model: one sentence each, in the error, warning or advice, with the fix."""

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.exc import BackendCompilerFailed

import crisp_flex
from crisp_flex import ConfigError, CrispConfig, CrispFlexError, InputError, torch_internals

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
        ({"policy": "hybird"}, "policy must be one of hybrid, "),
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


Q = torch.zeros(1, 2, 64, 16)


class Pipeline:
    """As Transformers' pipelines: a callable with a model inside."""

    def __init__(self):
        self.model = Attention()

    def __call__(self, text):
        return text


def read_inside():
    with crisp_flex.record() as rec:
        rec.plot()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: crisp_flex.compile(None), "takes a torch.nn.Module or a function of tensors, got"),
        (lambda: crisp_flex.compile("org/name"), "load the model first, as with transformers'"),
        (lambda: crisp_flex.compile(Attention), "the class Attention: make an instance of it"),
        (lambda: crisp_flex.compile(Pipeline()), "give the module inside it, its .model"),
        (lambda: crisp_flex.compile(torch.compile(Attention())), "module inside it, model._orig"),
        (lambda: crisp_flex.compile(Attention(), "fast"), "write crisp_flex.CrispConfig.preset('f"),
        (lambda: crisp_flex.compile(Attention(), "fats.toml"), "give the path of a TOML file with"),
        (lambda: crisp_flex.compile(Attention(), {"tau": 1}), "CrispConfig.from_options({...})"),
        (lambda: crisp_flex.compile(Attention(), min_seqlen=8), "CrispConfig(min_seqlen=...)"),
        (lambda: crisp_flex.compile(Attention(), preset="fast"), "CrispConfig.preset(...)"),
        (lambda: crisp_flex.compile(Attention(), backend="flash"), "choose the kernel with Crisp"),
        (lambda: crisp_flex.explain(None, Q), "crisp_flex.explain takes a torch.nn.Module or"),
        (lambda: crisp_flex.explain(Attention(), Q, config={}), "CrispConfig.from_options({...})"),
        (lambda: crisp_flex.reports([1]), "hand over what crisp_flex.compile returned"),
        (lambda: crisp_flex.record(Attention()).__enter__(), "write record(model=model)"),
        (lambda: crisp_flex.record(heads=3).__enter__(), "heads such as (0, 5), got 3"),
        (read_inside, "the rows are read when the record block ends: ask for them behind it"),
        (lambda: CrispConfig(block_size=100), "in [16, 512], (query, key), such as (128, 128); g"),
        (lambda: CrispConfig(overrides=["layers.0"]), "must be a dict such as {"),
        (lambda: CrispConfig(overrides={"layers.0": False}), "must be a dict such as {"),
        (lambda: CrispConfig.preset("blanced"), "one of fast, balanced, accurate, got 'blanced'"),
        (lambda: crisp_flex.route([1], [2]), "must be tensors [B, H, L, D]; got list"),
        (lambda: crisp_flex.route(Q, Q, "fast"), "write crisp_flex.CrispConfig.preset('fast')"),
        (lambda: crisp_flex.route(Q, Q[:, :, :8]), "(the layout is [B, H, L, D])"),
    ],
)
def test_wrong_use_is_one_sentence_that_names_the_fix(call, says):
    with pytest.raises(CrispFlexError) as raised:
        call()
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_sparse_attention_warns_that_it_has_no_backward():
    with pytest.warns(UserWarning, match=r"no backward, .*call it under torch.no_grad\(\)"):
        crisp_flex.sparse_attention(Q.clone().requires_grad_(), Q, Q)


def test_a_model_compiled_again_has_its_last_config(as_it_is):
    model = crisp_flex.compile(Attention().eval())
    with torch.no_grad():
        model(Q)
        crisp_flex.compile(model, CONFIG)(Q)
    assert [len(report.rewritten) for report in crisp_flex.reports(model)] == [1]
