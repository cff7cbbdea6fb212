"""Every Reason has a graph that triggers it, and a refused graph stays as it was."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from graphs import capture, causal, padded_mask, position_mask, repeat_kv

from crisp_flex import CrispConfig, Reason, toolchain, torch_internals
from crisp_flex.passes import eligibility
from crisp_flex.passes.lift_mask import lift_mask
from crisp_flex.passes.match import find_sdpa_sites
from crisp_flex.passes.pipeline import run_passes

L = 256
CONFIG = CrispConfig(min_seqlen=128)


def qkv(B=1, Hq=4, Hkv=2, Lq=L, Lkv=None, D=32, Dv=None, dtype=torch.float32, device="cpu"):
    make = partial(torch.randn, dtype=dtype, device=device)
    Lkv = Lkv or Lq
    return make(B, Hq, Lq, D), make(B, Hkv, Lkv, D), make(B, Hkv, Lkv, Dv or D)


def sdpa(**options):
    return lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, **{"is_causal": True, "enable_gqa": True, **options}
    )


def masked(mask, **options):
    """SDPA under mask(query position, key position), heads repeated."""

    def fn(q, k, v):
        query = torch.arange(q.shape[2])[None, None, :, None]
        key = torch.arange(k.shape[2])[None, None, None, :]
        return F.scaled_dot_product_attention(
            q, *repeat_kv(q, k, v), attn_mask=mask(query, key), **options
        )

    return fn


def given_mask(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def cut_at_run_time(q, k, v, n):
    size = n.sum().item()  # a computed number, so the graph has no value for it
    torch._check(size > 1)
    torch._check(size <= q.shape[2])
    q, k, v = (x[:, :, :size] for x in (q, k, v))
    return causal(q, k, v)


def under_vmap(q, k, v):
    return torch.vmap(causal)(q, k, v)


def checkpointed(q, k, v):
    return torch.utils.checkpoint.checkpoint(causal, q, k, v, use_reentrant=False)


def limited(query, key):
    limit = torch.nn.functional.pad(torch.ones(1, L - 56, dtype=torch.bool), (0, 56))
    batch = torch.arange(1)[:, None, None, None]
    return (key <= query) & limit[batch, key]


def documents(q, k, v, ids):
    batch = torch.arange(1)[:, None, None, None]
    query = torch.arange(L)[None, None, :, None]
    key = torch.arange(L)[None, None, None, :]
    mask = key <= query
    for row in range(ids.shape[0]):
        mask = mask & (ids[batch + row, query] == ids[batch + row, key])
    return F.scaled_dot_product_attention(q, *repeat_kv(q, k, v), attn_mask=mask)


def behind_the_keys(q, k, v):
    mask = position_mask(1, q.shape[2], k.shape[2], q.device, offset=k.shape[2] - 128)
    return F.scaled_dot_product_attention(q, *repeat_kv(q, k, v), attn_mask=mask)


def window_of_unknown_width(q, k, v, width):
    query, key = torch.arange(L)[:, None], torch.arange(L)
    mask = (key <= query) & (key > query - width)
    return F.scaled_dot_product_attention(q, *repeat_kv(q, k, v), attn_mask=mask)


def behind_a_position(q, k, v, position):
    mask = position_mask(1, q.shape[2], k.shape[2], q.device, offset=position)
    return F.scaled_dot_product_attention(q, *repeat_kv(q, k, v), attn_mask=mask)


def own(*, softcap=None, sinks=False):
    """The operator behind attn_implementation="crisp_flex"."""

    def fn(q, k, v):
        extra = torch.zeros(q.shape[1]) if sinks else None
        return torch.ops.crisp_flex.attention.default(q, k, v, None, extra, True, 0.1, softcap)

    return fn


# Reason -> (function, its inputs, config, dynamic)
REFUSED = {
    Reason.DISABLED: (causal, qkv(), CrispConfig(min_seqlen=128, enabled=False), None),
    Reason.NESTED_GRAPH: (checkpointed, qkv(), CONFIG, None),
    Reason.NOT_FOUR_DIMENSIONAL: (
        sdpa(enable_gqa=False),
        tuple(x[0] for x in qkv(Hkv=4)),
        CONFIG,
        None,
    ),
    Reason.NOT_PLAIN_TENSOR: (
        under_vmap,
        tuple(torch.stack([x, x]) for x in qkv()),
        CONFIG,
        None,
    ),
    Reason.UNBACKED_SHAPE: (cut_at_run_time, (*qkv(), torch.tensor([100, 100])), CONFIG, None),
    Reason.HAS_DROPOUT: (sdpa(dropout_p=0.1), qkv(), CONFIG, None),
    Reason.UNSUPPORTED_DEVICE: (causal, qkv(device="meta"), CONFIG, None),
    Reason.UNSUPPORTED_DTYPE: (causal, qkv(dtype=torch.float64), CONFIG, None),
    Reason.HEAD_DIM: (causal, qkv(D=4), CONFIG, None),
    Reason.CPU_SINKS: (own(sinks=True), qkv(), CONFIG, None),
    Reason.CAP_UNKNOWN: (own(softcap=-1.0), qkv(), CONFIG, None),
    Reason.DECODE: (sdpa(is_causal=False), qkv(Lq=1, Lkv=L), CONFIG, None),
    Reason.NOT_CAUSAL: (sdpa(is_causal=False), qkv(), CONFIG, None),
    Reason.LENGTHS_DIFFER: (causal, qkv(Lq=L, Lkv=2 * L), CONFIG, None),
    Reason.FLOAT_MASK: (
        masked(lambda q, k: torch.where(k <= q, 0.1, float("-inf"))),
        qkv(),
        CONFIG,
        None,
    ),
    Reason.MASK_IS_INPUT: (
        given_mask,
        (*qkv(), torch.ones(L, L, dtype=torch.bool).tril()),
        CONFIG,
        None,
    ),
    Reason.MASK_NOT_CAUSAL: (masked(lambda q, k: q <= k), qkv(), CONFIG, None),
    Reason.MASK_OFFSET: (behind_the_keys, qkv(Lq=L, Lkv=L + 64), CONFIG, None),
    Reason.MASK_WINDOW: (window_of_unknown_width, (*qkv(), torch.tensor(64)), CONFIG, None),
    Reason.MASK_CHUNKS: (
        masked(lambda q, k: (k <= q) & (k // 64 == q // 64) & (k // 96 == q // 96)),
        qkv(),
        CONFIG,
        None,
    ),
    Reason.MASK_DOCUMENTS: (
        documents,
        (*qkv(), torch.stack([torch.arange(L) // 100, torch.arange(L) // 128])),
        CONFIG,
        None,
    ),
    Reason.MASK_KV_LIMIT: (masked(lambda q, k: (k <= q) & (k < 200)), qkv(), CONFIG, None),
    Reason.MASK_UNREAD: (
        masked(lambda q, k: (k <= q) | ((q < 64) & (k < 64))),
        qkv(),
        CONFIG,
        None,
    ),
    Reason.CPU_DYNAMIC_PADDING: (
        padded_mask,
        (*qkv(), torch.ones(1, L, dtype=torch.int64)),
        CONFIG,
        True,
    ),
    Reason.TOO_SHORT: (causal, qkv(), CrispConfig(min_seqlen=L + 1), None),
}
# SDPA itself refuses these calls while tracing, so the graph is made by hand from a good one.
BY_HAND = {
    Reason.NO_SHAPES: lambda node: [n.meta.pop("example_value") for n in node.args],
    Reason.MIXED_DTYPES: lambda node: _retype(node.args[2], dtype=torch.bfloat16),
    Reason.BATCH_MISMATCH: lambda node: _reshape(node.args[1], (2, 2, L, 32)),
    Reason.HEADS_MISMATCH: lambda node: _reshape(node.args[1], (1, 3, L, 32)),
    Reason.MASK_WITH_CAUSAL: lambda node: node.update_kwarg("attn_mask", node.args[0]),
    Reason.NEEDS_GRAD: lambda node: node.meta["example_value"].requires_grad_(),
    Reason.CPU_LACKS_FLEX: lambda node: None,
    Reason.NO_COMPILER: lambda node: None,
    Reason.SCALE_UNKNOWN: lambda node: node.update_kwarg("scale", node.args[0]),
}


def _retype(node, dtype):
    node.meta["example_value"] = node.meta["example_value"].to(dtype)


def _reshape(node, shape):
    node.meta["example_value"] = node.meta["example_value"].new_empty(shape)


# what Inductor raises comes behind the passes (tests/cases/test_missing_tools.py); a second device
# has a test of its own below, selection on CUDA one in test_selection.py
ELSEWHERE = (Reason.NOT_COMPILED, Reason.MASK_DEVICE, Reason.NO_SELECTION_KERNEL)
BY_THE_PASSES = [reason for reason in Reason if reason not in ELSEWHERE]


@pytest.mark.parametrize("reason", BY_THE_PASSES, ids=lambda reason: reason.name)
def test_refused_sites_stay_dense(reason, monkeypatch):
    if reason in REFUSED:
        fn, inputs, config, dynamic = REFUSED[reason]
        with torch._dynamo.config.patch(capture_scalar_outputs=True):
            gm = capture(fn, *inputs, dynamic=dynamic)
    else:
        gm, config = capture(causal, *qkv()), CONFIG
        (node,) = gm.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
        BY_HAND[reason](node)
        if reason is Reason.CPU_LACKS_FLEX:
            monkeypatch.setattr(torch_internals, "cpu_has_flex", lambda: False)
        if reason is Reason.NO_COMPILER:
            monkeypatch.setattr(toolchain, "missing", lambda device_type: "no compiler")
        gm.recompile()
    before = gm.code
    report = run_passes(gm, config)
    assert [site.rejection.reason for site in report.rejected] == [reason]
    assert report.rewritten == []
    assert gm.code == before
    assert reason.value in str(report)


def test_the_same_call_without_the_fault_is_rewritten():
    report = run_passes(capture(causal, *qkv()), CONFIG)
    assert [site.mask for site in report.rewritten] == ["causal"]
    assert report.rejected == []


def test_a_padding_mask_that_is_too_narrow_keeps_its_own_error():
    inputs = (*qkv(), torch.ones(1, L, dtype=torch.int64))
    gm = capture(padded_mask, *inputs)
    (source,) = (n for n in gm.graph.nodes if n.name == "l_attention_mask_")
    source.meta["example_value"] = source.meta["example_value"].new_empty(1, L - 56)
    report = run_passes(gm, CONFIG)
    assert [site.rejection.reason for site in report.rejected] == [Reason.LENGTHS_DIFFER]


def test_a_real_gradient_keeps_the_call_dense():
    inputs = [x.requires_grad_() for x in qkv()]
    report = run_passes(capture(causal, *inputs), CONFIG)
    assert [site.rejection.reason for site in report.rejected] == [Reason.NEEDS_GRAD]
    with torch.no_grad():
        report = run_passes(capture(causal, *inputs), CONFIG)
    assert len(report.rewritten) == 1


@pytest.mark.parametrize(
    ("Lq", "past", "sparse"),
    [
        (8192, 0, True),
        (8064, 0, False),
        (8064, 128, False),
        (8064, 512, True),
        (2048, 2048, False),
        (2048, 62 * 1024, True),
        (512, 64 * 1024, False),
    ],
)
def test_min_seqlen_counts_the_work_of_a_chunk(Lq, past, sparse):
    """2k queries behind 62k keys are more work than 8k over themselves; 512 never pay."""

    def chunk(q, k, v):
        mask = position_mask(1, q.shape[2], k.shape[2], q.device, offset=past)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    q, k, v = (torch.empty(1, 1, n, 16, device="meta") for n in (Lq, Lq + past, Lq + past))
    gm = capture(chunk, q, k, v)
    (site,) = find_sdpa_sites(gm)
    mask = lift_mask(site.attn_mask) if past else None
    call = eligibility._Call(site, q, k, v, q, mask, CrispConfig())
    assert eligibility._pays(call) == sparse


@pytest.mark.parametrize(
    ("fn", "given", "detail"),
    [
        (padded_mask, torch.ones(1, L, dtype=torch.int64), "padding on meta, query on cpu"),
        (documents, torch.arange(L)[None] // 100, "ids on meta, query on cpu"),
        (behind_a_position, torch.tensor(0), "position on meta, query on cpu"),
    ],
    ids=["padding", "documents", "position"],
)
def test_a_mask_from_tensors_on_another_device_says_so(fn, given, detail):
    """As with a model on CUDA whose attention_mask was left on the CPU."""
    gm = capture(fn, *qkv(), given)
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    (source,) = (node for node in inputs if node.meta["example_value"].dim() < 4)
    found = source.meta["example_value"]
    with found.fake_mode:
        source.meta["example_value"] = torch.empty(found.shape, dtype=found.dtype, device="meta")
    before = gm.code
    (site,) = run_passes(gm, CONFIG).sites
    assert (site.rejection.reason, site.rejection.detail) == (Reason.MASK_DEVICE, detail)
    assert gm.code == before
