"""Soft caps and sinks on CUDA: the TRITON kernel's score_mod and log-sum-exp, against dense."""

import pytest
import torch
from masked_attention import relative_error

from crisp_flex import CrispConfig, CrispFlexBackend

pytestmark = pytest.mark.gpu
attention = torch.ops.crisp_flex.attention.default
L = 1000


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_the_rewritten_call_equals_the_dense_operator(cap, sinks, qkv):
    q, k, v = qkv(B=2, Hq=8, Hkv=2, Lq=L, D=64, dtype=torch.bfloat16, device="cuda")
    extra = torch.linspace(-2, 8, 8, device="cuda", dtype=torch.bfloat16) if sinks else None
    backend = CrispFlexBackend(CrispConfig(min_seqlen=128, policy="dense"))
    with torch.no_grad():
        fn = torch.compile(
            lambda *qkv: attention(*qkv, None, extra, True, 0.5, cap), backend=backend
        )
        got = fn(q, k, v)
        ((site,),) = (report.sites for report in backend.reports.values())
        assert site.rewritten
        assert site.kernel == "TRITON" or (cap is None and not sinks)
        given = tuple(x.float() for x in (q, k, v))
        factor = None if extra is None else extra.float()
        want = attention(*given, None, factor, True, 0.5, cap)
        assert relative_error(got.float(), want) < 1e-2
        if sinks:
            assert relative_error(attention(*given, None, None, True, 0.5, cap), want) > 0.1
