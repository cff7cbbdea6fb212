"""AOTAutograd's cache sees the rewritten graph: the same config hits, another one misses."""

import pytest
import torch
from graphs import causal

from crisp_flex import CrispConfig, CrispFlexBackend


@pytest.mark.slow
def test_same_config_hits_and_another_misses(tmp_path, monkeypatch, qkv):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    q, k, v = qkv(Lq=256, D=32)

    def hits(**settings):
        torch._dynamo.reset()
        counters = torch._dynamo.utils.counters
        counters.clear()
        backend = CrispFlexBackend(CrispConfig(min_seqlen=128, **settings))
        with torch.no_grad():
            torch.compile(causal, backend=backend)(q, k, v)
        return counters["aot_autograd"]["autograd_cache_hit"]

    assert [hits(), hits(), hits(coverage=0.5), hits()] == [0, 1, 0, 1]
