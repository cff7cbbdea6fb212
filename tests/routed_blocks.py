"""The blocks that the route op keeps, as a bool map."""

from crisp_flex.routing import ops
from crisp_flex.routing.params import RouteParams
from tests.masked_attention import kept_blocks


def routed_blocks(q, k, config, key_valid=None):
    """[B, Hq, Nq, Nkv] bool for q [B, Hq, Lq, D], k [B, Hkv, Lkv, D] under a CrispConfig."""
    params = RouteParams.from_config(config, D=q.shape[3])
    counts, buffer, full_counts, _ = ops.route(q, k, key_valid, params)
    Nkv = -(-k.shape[2] // params.block_kv)
    P = buffer.shape[3] - Nkv
    return kept_blocks(counts, buffer[..., :Nkv], full_counts, buffer[..., P:], Nkv)
