"""On CUDA, through Inductor: packed documents and chunks of positions equal dense attention."""

import pytest
import torch
import torch.nn.functional as F
from masked_attention import relative_error

import crisp_flex
from crisp_flex import CrispConfig, CrispFlexBackend
from tests.families.models import ids, make

pytestmark = pytest.mark.gpu


def documents(b, q, k, ids):
    return ids[b, q] == ids[b, k]


def chunks(b, q, k, padding):
    return (k - padding[b]) // 700 == (q - padding[b]) // 700


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
@pytest.mark.parametrize("same", [documents, chunks])
def test_segments_equal_dense(same, padded, dynamic, qkv):
    def fn(q, k, v, given, valid=None):
        B, L = given.shape[0], q.shape[2]
        b = torch.arange(B, device=q.device)[:, None, None, None]
        query = torch.arange(L, device=q.device)[None, None, :, None]
        key = torch.arange(L, device=q.device)[None, None, None, :]
        mask = (key <= query) & same(b, query, key, given)
        if valid is not None:
            mask = mask & valid.bool()[b, key]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    backend = CrispFlexBackend(CrispConfig(min_seqlen=512))
    compiled = torch.compile(fn, backend=backend, dynamic=dynamic)
    first = torch.tensor([0, 300], device="cuda")
    for L in (2048, 2900):
        q, k, v = (x.cuda().bfloat16() for x in qkv(B=2, Lq=L, D=64))
        tokens = torch.arange(L, device="cuda")
        given = torch.stack([tokens // 600, tokens // 300 % 3]) if same is documents else first
        valid = (tokens >= first[:, None]).long() if padded else None
        with torch.no_grad():
            got, want = compiled(q, k, v, given, valid), fn(q, k, v, given, valid)
        assert got.isfinite().all()
        rows = slice(300 if padded else 0, None)
        assert relative_error(got[:, :, rows], want[:, :, rows]) < 5e-3, L
    sites = [site for report in backend.reports.values() for site in report.sites]
    assert {(site.policy, site.kernel) for site in sites} == {("segments", "TRITON")}


def test_prompts_packed_by_position_ids_alone_keep_their_own_logits():
    lengths = (900, 1, 1500, 699)
    sizes = {"hidden_size": 256, "head_dim": 64, "max_position_embeddings": 4096}
    model = make("Llama", initializer_range=0.05, **sizes).to("cuda", torch.bfloat16)
    tokens = ids(sum(lengths)).cuda()
    positions = torch.cat([torch.arange(length) for length in lengths])[None].cuda()
    with torch.no_grad():
        alone = [model(input_ids=x, use_cache=False).logits for x in tokens.split(lengths, 1)]
        crisp_flex.compile(model, CrispConfig(min_seqlen=512))
        got = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
    sites = [site for report in crisp_flex.reports(model) for site in report.sites]
    assert [(site.policy, site.kernel) for site in sites] == [("segments", "TRITON")] * 2, sites
    assert relative_error(got.float(), torch.cat(alone, 1).float()) < 3e-2
