"""B09: queries in the middle that need what no other query needs; the number is recorded.

A stress test of the method: blocks are chosen from a pooled map, from the last 128 queries and from
a few audited blocks. A query block between the audited ones, in which a heavy key is one of a
block's keys, is seen by the pooled map only.
"""

import pytest
import torch
import torch.nn.functional as F
from masked_attention import masked_attention, relative_error
from routed_blocks import routed_blocks

from crisp_flex import CrispConfig
from tests.cases.peaky import dense, qkv

L, BLOCK = 4096, (64, 64)
MIDDLE = slice(L // 2, L // 2 + 256)


def needle():
    """The scene of B09: only the queries in the middle look at key L / 5."""
    q, k, v = qkv(Hq=2, Lq=L, D=64, columns=(0.0,))
    direction = F.normalize(torch.randn(64, generator=torch.Generator().manual_seed(9)), dim=0)
    strength = (24 * 64**0.5) ** 0.5
    k[:, :, L // 5] += strength * direction
    q[:, :, MIDDLE] += strength * direction
    return q, k, v


def errors(q, k, v, config):
    got = masked_attention(q, k, v, routed_blocks(q, k, config), BLOCK)
    want = dense(q, k, v, is_causal=True)
    rows = MIDDLE, slice(L - 256, L)
    return [relative_error(got[:, :, part], want[:, :, part]) for part in rows]


@pytest.mark.parametrize("preset", ["fast", "balanced", "accurate"])
def test_b09_the_error_of_the_middle_is_recorded_and_the_end_is_right(preset, record_property):
    q, k, v = needle()
    middle, last = errors(q, k, v, CrispConfig.preset(preset, block_size=BLOCK))
    record_property("relative error of the needle's rows", middle)
    assert last < 2e-2


def test_b09_an_audit_of_every_row_catches_it():
    every = {"audit_rows": L // BLOCK[0], "coverage_reduce": "min"}
    middle, last = errors(*needle(), CrispConfig(block_size=BLOCK, **every))
    assert middle < 0.2
    assert last < 2e-2
