"""Threads, forks, limits and hints: B12, B20, B32. Graphs run as rewritten, without Inductor."""

import os
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from masked_attention import relative_error

import crisp_flex
from crisp_flex import CrispConfig
from tests.cases.peaky import Sdpa, dense, qkv

CONFIG = CrispConfig(min_seqlen=64, block_size=(16, 16), policy="dense")


pytestmark = pytest.mark.usefixtures("without_inductor")


def test_b12_a_model_without_sdpa_is_told_of_once():
    def by_hand(q, k, v):
        return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v

    fn = crisp_flex.compile(by_hand, CONFIG)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fn(*qkv(Lq=96))
        fn(*qkv(Lq=128))
        fn(*qkv(Lq=160))
    assert len([w for w in seen if "crisp_flex" in str(w.message)]) == 1


def test_b20_forced_eager_is_plain_sdpa():
    model = crisp_flex.compile(Sdpa(is_causal=True), CONFIG)
    inputs = qkv(Lq=128)
    with torch.compiler.set_stance("force_eager"):
        assert torch.equal(model(*inputs), dense(*inputs, is_causal=True))
    assert crisp_flex.reports(model) == []


def test_b32_threads_share_a_model():
    model = crisp_flex.compile(Sdpa(is_causal=True), CONFIG, dynamic=True)
    inputs = [qkv(Hq=2, Lq=96 + 16 * i, D=16, seed=i) for i in range(8)]

    def call(x):
        with torch.no_grad():
            return model(*x)

    for _ in range(2):  # cold, then warm
        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(call, inputs))
        for got, x in zip(results, inputs, strict=True):
            assert relative_error(got, dense(*x, is_causal=True)) < 1e-5


def test_past_the_recompile_limit_results_stay_right():
    model = crisp_flex.compile(Sdpa(is_causal=True), CONFIG, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=False):
        for length in (96, 112, 128, 144, 160):
            inputs = qkv(Lq=length)
            assert relative_error(model(*inputs), dense(*inputs, is_causal=True)) < 1e-5
    assert len(crisp_flex.reports(model)) == 2  # the rest is plain SDPA, which is linear in memory


FORKED = """
import os, torch, crisp_flex
q = torch.randn(1, 2, 300, 16)
want = crisp_flex.route(q, q).kv_num_blocks
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(crisp_flex.route(q, q).kv_num_blocks, want) else 3)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_after_the_import_can_route():
    # one thread: OpenMP's workers do not survive a fork, here as in all of torch
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", FORKED], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
