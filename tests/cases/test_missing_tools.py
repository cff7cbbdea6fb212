"""What is missing or broken on a machine: a slower path, one warning that says what to install.

Each fault is a real one where that is possible without a GPU: a package that raises on import, a
compiler that is not there or that fails. What only a GPU would show stands in test_gpu_systems.py.
"""

import sys
import warnings

import pytest
import torch
from masked_attention import relative_error
from torch._inductor.exc import InductorError
from torch._subclasses.fake_tensor import FakeTensorMode

import crisp_flex
from crisp_flex import CrispConfig, FallbackWarning, Reason, flex_hop, toolchain, torch_internals
from crisp_flex.dense_attention import dense_attention
from crisp_flex.routing import ops
from crisp_flex.routing.params import RouteParams
from tests.cases.peaky import Sdpa, dense, qkv

CONFIG = CrispConfig(min_seqlen=64, block_size=(64, 64), policy="dense")
CACHES = (
    toolchain.missing, toolchain.flash_problem, toolchain.warn_once,
    toolchain._triton_problem, toolchain._cpp_problem,
)  # fmt: skip


@pytest.fixture(autouse=True)
def forget():
    for cache in CACHES:
        cache.cache_clear()
    with torch.no_grad():
        yield
    for cache in CACHES:
        cache.cache_clear()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """package(name, text): from now on, importing name runs text."""

    def make(name, text):
        for loaded in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
            monkeypatch.delitem(sys.modules, loaded)
        folder = tmp_path.joinpath(*name.split("."))
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))

    yield make
    for loaded in [m for m in sys.modules if m.startswith("flash_attn")]:
        monkeypatch.delitem(sys.modules, loaded)


def fallbacks(seen):
    return [str(w.message) for w in seen if issubclass(w.category, FallbackWarning)]


def on_hopper(monkeypatch, backend="auto", D=128):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    call = {"D": D, "Dv": D, "block_size": (128, 128), "backend": backend, "captures": False}
    return flex_hop.choose_kernel(torch.device("cuda", 0), torch.bfloat16, **call)


FLASH = {
    "not there": (None, "is not installed: pip install flash-attn-4"),
    "version 2 only": ("", "is not installed: pip install flash-attn-4"),
    "ImportError": ('raise ImportError("libcute.so: no such file")', "libcute.so: no such file"),
    "OSError": ('raise OSError("invalid ELF header")', "invalid ELF header"),
    "a mismatch": ("import torch; torch.no_such_name", "no attribute 'no_such_name'"),
    "a part missing": ("import no_such_part", "No module named 'no_such_part'"),
}


@pytest.mark.parametrize("fault", FLASH)
@pytest.mark.parametrize("D", [128, 256])
def test_flash_attn_4_missing_or_broken_is_said_once_and_triton_taken(
    fault, D, package, monkeypatch
):
    text, said = FLASH[fault]
    if text is not None:
        package("flash_attn", text)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert [on_hopper(monkeypatch, D=D) for _ in range(3)] == ["TRITON"] * 3
    (message,) = fallbacks(seen)
    assert said in message
    assert "attention runs on TRITON" in message
    assert "pip install" in message


def test_nothing_is_said_of_flash_where_it_would_not_be_taken(monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert on_hopper(monkeypatch, backend="triton") == "TRITON"
        assert on_hopper(monkeypatch, D=100) == "TRITON"
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        cuda = torch.device("cuda", 0)
        call = {"D": 128, "Dv": 128, "block_size": (128, 128), "backend": "auto"}
        assert flex_hop.choose_kernel(cuda, torch.bfloat16, **call, captures=False) == "TRITON"


def test_flash_asked_for_by_name_is_an_error_that_says_what_is_broken(package, monkeypatch):
    package("flash_attn", 'raise OSError("invalid ELF header")')
    with pytest.raises(crisp_flex.UnavailableError, match="invalid ELF header"):
        on_hopper(monkeypatch, backend="flash")


TRITON = {
    "not there": ("raise ModuleNotFoundError('No module named triton', name='triton')", "pip"),
    "broken": ("raise ImportError('libtriton.so: no such file')", "libtriton.so: no such file"),
}


@pytest.mark.parametrize("fault", TRITON)
def test_without_triton_a_cuda_call_stays_dense_and_route_is_plain_pytorch(
    fault, package, monkeypatch
):
    text, said = TRITON[fault]
    package("triton", text)
    problem = toolchain.missing("cuda")
    assert said in problem
    assert "pip install" in problem
    with FakeTensorMode():
        q = torch.empty(1, 2, 256, 64, dtype=torch.bfloat16, device="cuda")
    params = RouteParams.from_config(CrispConfig(block_size=(64, 64)), D=64)
    with pytest.warns(FallbackWarning, match="blocks are chosen by plain PyTorch"):
        assert not ops.has_kernels(q, q, params)


def refused(model):
    return [s.rejection.reason for report in crisp_flex.reports(model) for s in report.rejected]


def test_where_nothing_compiles_models_and_functions_run_dense(monkeypatch):
    monkeypatch.setattr(torch_internals, "cpp_compiler", lambda: None)
    monkeypatch.setattr(torch_internals, "compile_with_inductor", None)  # not to be called
    model = crisp_flex.compile(Sdpa(is_causal=True), CONFIG)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for length in (128, 160, 192):
            inputs = qkv(Lq=length)
            want = dense(*inputs, is_causal=True)
            assert relative_error(model(*inputs), want) < 1e-5
            got = crisp_flex.sparse_attention(*inputs, config=CONFIG)
            assert relative_error(got, want) < 1e-5
    assert set(refused(model)) == {Reason.NO_COMPILER}
    compiled, function = fallbacks(seen)
    assert "install g++, or set CXX" in compiled
    assert "the model runs uncompiled" in compiled
    assert "sparse_attention is dense" in function


def failing(*, times):
    """Inductor, which fails that often before it does its work."""
    left, really = [times], torch_internals.compile_with_inductor

    def compile_with_inductor(gm, example_inputs, patches):
        left[0] -= 1
        if left[0] >= 0:
            raise InductorError(RuntimeError("out of resource: shared memory"), None)
        return really(gm, example_inputs, patches)

    return compile_with_inductor


def test_a_sparse_call_that_does_not_compile_is_compiled_as_the_model_wrote_it(monkeypatch):
    monkeypatch.setattr(torch_internals, "compile_with_inductor", failing(times=1))
    model, inputs = crisp_flex.compile(Sdpa(is_causal=True), CONFIG), qkv(Lq=128)
    with pytest.warns(FallbackWarning, match="out of resource: shared memory.*dense attention"):
        got = model(*inputs)
    assert relative_error(got, dense(*inputs, is_causal=True)) < 1e-5
    assert refused(model) == [Reason.NOT_COMPILED]


def test_a_compiler_that_fails_is_named_and_the_graph_runs_uncompiled(monkeypatch, tmp_path):
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'fatal error: Python.h: No such file' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(torch_internals, "cpp_compiler", lambda: str(compiler))
    monkeypatch.setattr(torch_internals, "compile_with_inductor", failing(times=1))
    model, inputs = crisp_flex.compile(Sdpa(is_causal=True), CONFIG), qkv(Lq=128)
    with pytest.warns(FallbackWarning, match=r"Python\.h: No such file.*python3-dev"):
        got = model(*inputs)
    assert torch.equal(got, dense(*inputs, is_causal=True))
    assert refused(model) == [Reason.NO_COMPILER]


def test_what_is_wrong_with_the_models_own_graph_stays_an_error(monkeypatch):
    monkeypatch.setattr(torch_internals, "compile_with_inductor", failing(times=2))
    model = crisp_flex.compile(Sdpa(is_causal=True), CONFIG)
    with pytest.warns(FallbackWarning), pytest.raises(InductorError, match="shared memory"):
        model(*qkv(Lq=128))


@pytest.mark.parametrize("cxx", ["/nonexistent/c++", "/bin/false", __file__])
def test_a_cxx_that_does_not_run_is_no_compiler(cxx, monkeypatch):
    monkeypatch.setenv("CXX", cxx)
    with torch._inductor.config.patch({"cpp.cxx": (None, cxx)}):
        assert f"CXX={cxx} does not run" in toolchain.missing("cpu")


@pytest.mark.parametrize("padded", [False, True])
def test_dense_attention_goes_by_rows_and_means_the_same(padded, monkeypatch):
    q, k, v = qkv(B=2, Hq=4, Hkv=2, Lq=50, Lkv=83)
    valid = torch.arange(83) >= torch.tensor([[0], [40]]) if padded else None
    whole = dense_attention(q, k, v, valid, None)
    mask = torch.arange(83) <= torch.arange(33, 83)[:, None]
    if padded:
        mask = mask & valid[:, None, None]
    assert relative_error(whole, dense(q, k, v, attn_mask=mask)) < 1e-6
    monkeypatch.setattr("crisp_flex.dense_attention._MOST_MASK", 83 * 7)
    assert relative_error(dense_attention(q, k, v, valid, None), whole) < 1e-6
    assert whole.isfinite().all()
