"""On CUDA: sizes at which 32 bits do not count elements, a million tokens, odd head dims.

At the sizes here a whole dense result takes too long or too much memory, so rows are looked at:
some of the first blocks, the middle and the end, in fp32 over the blocks that the op lists.
"""

import pytest
import torch
from masked_attention import relative_error

import crisp_flex
from crisp_flex import CrispConfig
from crisp_flex.routing import ops
from crisp_flex.routing.params import RouteParams
from tests.cases.peaky import Sdpa, dense, qkv
from tests.masked_attention import listed

pytestmark = pytest.mark.gpu
BLOCK = 128
# each head for itself, so that a head alone tells what it keeps among others
CONFIG = CrispConfig(policy="hybrid", block_size=(BLOCK, BLOCK))
TOLERANCE = 1.5e-2  # bf16


@pytest.fixture(autouse=True)
def inference():
    torch.cuda.empty_cache()
    with torch.no_grad():
        yield
    torch.cuda.empty_cache()


def made(B, Hq, Hkv, L, D):
    """q, k, v in bf16 made on the device; all rows look at four heavy keys, one near the end."""
    gen = torch.Generator("cuda").manual_seed(0)

    def normal(H, factor):
        x = torch.empty(B, H, L, D, dtype=torch.bfloat16, device="cuda")
        for row in x.view(B * H, L, D):  # nothing of the whole size in fp32
            row.copy_(torch.randn(L, D, generator=gen, device="cuda") * factor)
        return x

    q, k, v = normal(Hq, 0.3), normal(Hkv, 0.3), normal(Hkv, 1.0)
    direction = torch.nn.functional.normalize(
        torch.randn(D, generator=gen, device="cuda"), dim=0
    ).to(torch.bfloat16)
    # exp(logit) of a heavy key outweighs the background of L keys
    strength = ((16 + torch.log(torch.tensor(L / 4096.0)).clamp(min=0).item()) * D**0.5) ** 0.5
    q += strength * direction
    for at in (0, L // 3, L // 2, L - 300):
        k[:, :, at] += strength * direction
    return q, k, v


def expected_rows(q, k, v, keep, b, h, block):
    """Attention of one query block in fp32 over its kept blocks; keep is [Nkv] bool."""
    L, G = q.shape[2], q.shape[1] // k.shape[1]
    rows = torch.arange(block * BLOCK, min((block + 1) * BLOCK, L), device="cuda")
    kept = keep.nonzero().flatten()
    keys = (kept[:, None] * BLOCK + torch.arange(BLOCK, device="cuda")).flatten()
    keys = keys[keys < L]
    logits = q[b, h, rows].float() @ k[b, h // G, keys].float().T * q.shape[3] ** -0.5
    logits = logits.masked_fill(keys > rows[:, None], float("-inf"))
    return logits.softmax(-1) @ v[b, h // G, keys].float()


def check_rows(q, k, v, got, config, heads):
    """Some query blocks of the given (batch, head) pairs, and that the lists are sparse."""
    L, G = q.shape[2], q.shape[1] // k.shape[1]
    Nq = -(-L // BLOCK)
    params = RouteParams.from_config(config, D=q.shape[3])
    for b, h in heads:
        one_q, one_k = q[b : b + 1, h : h + 1], k[b : b + 1, h // G : h // G + 1]
        counts, buffer, full, _ = ops.route(one_q, one_k, None, params)
        P = buffer.shape[3] - Nq
        for block in (1, Nq // 3 + 5, Nq // 2 + 3, Nq - 2, Nq - 1):
            keep = listed(counts[:, :, block, None], buffer[:, :, block, None, :Nq], Nq)
            keep = keep | listed(full[:, :, block, None], buffer[:, :, block, None, P:], Nq)
            keep = keep.flatten()
            assert keep[block]
            assert not keep[block + 1 :].any()
            want = expected_rows(q, k, v, keep, b, h, block)
            rows = slice(block * BLOCK, min((block + 1) * BLOCK, L))
            assert relative_error(got[b, h, rows], want) < TOLERANCE, (b, h, block)
        assert (counts + full).float().mean() < 0.5 * Nq / 2


def test_more_than_two_to_the_31_elements_in_query():
    B, Hq, Hkv, L, D = 4, 40, 4, 131072, 128
    assert B * Hq * L * D > 1 << 31
    q, k, v = made(B, Hq, Hkv, L, D)
    got = crisp_flex.sparse_attention(q, k, v, config=CONFIG)
    # the last head starts beyond element 2**31
    check_rows(q, k, v, got, CONFIG, [(0, 0), (2, 21), (3, Hq - 1)])


def test_more_than_two_to_the_31_elements_in_key():
    B, H, L, D = 4, 33, 131072, 128
    assert B * H * L * D > 1 << 31
    q, k, v = made(B, H, H, L, D)
    got = crisp_flex.sparse_attention(q, k, v, config=CONFIG)
    check_rows(q, k, v, got, CONFIG, [(0, 0), (3, H - 1)])


@pytest.mark.parametrize("policy", ["hybrid", "crisp", "streaming"])
def test_more_than_two_to_the_31_elements_in_the_index_buffer(policy):
    B, H, L, D = 2, 17, 1 << 20, 16
    N = L // BLOCK
    assert B * H * N * N > 1 << 31
    q, k, _ = made(B, H, 1, L, D)
    config = CrispConfig(block_size=(BLOCK, BLOCK), policy=policy)
    params = RouteParams.from_config(config, D=D)
    assert ops.has_kernels(q, k, params)
    counts, buffer, full, stats = ops.route(q, k, None, params)
    assert buffer.numel() > 1 << 31
    P = buffer.shape[3] - N
    alone = ops.route(q[-1:, -1:], k[-1:], None, params)
    assert torch.equal(counts[-1, -1], alone[0][0, 0])
    assert torch.equal(full[-1, -1], alone[2][0, 0])
    assert stats.isfinite().all()
    for block in (0, 1, N // 2, N - 1):
        for whole, single, used, at in (
            (buffer[-1, -1, block, :N], alone[1][0, 0, block, :N], counts, 0),
            (buffer[-1, -1, block, P:], alone[1][0, 0, block, P:], full, P),
        ):
            n = int(used[-1, -1, block])
            assert torch.equal(whole[:n], single[:n]), (policy, block, at)
            assert (whole[1:n] > whole[: max(n - 1, 0)]).all()


@pytest.mark.parametrize("way", ["compiled", "sparse_attention"])
def test_a_million_tokens(way):
    L = 1 << 20
    q, k, v = made(1, 2, 1, L, 64)
    if way == "compiled":
        got = crisp_flex.compile(Sdpa(is_causal=True, enable_gqa=True), CONFIG)(q, k, v)
    else:
        got = crisp_flex.sparse_attention(q, k, v, config=CONFIG)
    assert got.isfinite().all()
    check_rows(q, k, v, got, CONFIG, [(0, 0), (0, 1)])


WIDTHS = [(72, 72), (80, 80), (96, 96), (160, 160), (192, 192), (224, 224), (256, 256)]
WIDTHS += [(192, 128), (64, 128), (96, 256)]


@pytest.mark.parametrize(("D", "Dv"), WIDTHS)
def test_head_dims_of_key_and_value(D, Dv):
    q, k, v = (x.to("cuda", torch.bfloat16) for x in qkv(Hq=4, Hkv=2, Lq=2085, D=D, Dv=Dv))
    config = CrispConfig(
        policy="hybrid", min_seqlen=1024, coverage=0.999, coverage_reduce="min", audit_rows=8
    )
    model = crisp_flex.compile(Sdpa(is_causal=True, enable_gqa=True), config)
    want = dense(q, k, v, is_causal=True)
    for got in (model(q, k, v), crisp_flex.sparse_attention(q, k, v, config=config)):
        assert got.shape == want.shape
        assert relative_error(got, want) < TOLERANCE
    (report,) = crisp_flex.reports(model)
    assert len(report.rewritten) == 1
