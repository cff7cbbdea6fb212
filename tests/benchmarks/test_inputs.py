"""The benchmarks' inputs: shapes, the patterns that were put in, and how many blocks they keep."""

import pytest
import torch

from crisp_flex import CrispConfig
from crisp_flex.routing import reference
from crisp_flex.routing.params import RouteParams


def densities(q, k):
    """[Hq]: the share of blocks that each head keeps."""
    params = RouteParams.from_config(CrispConfig(), D=q.shape[3])
    stats = reference.route(q, k, None, params)[3][0]
    return stats[:, 0] / stats[:, 1]


@pytest.mark.parametrize("name", ["columns", "structured"])
@pytest.mark.parametrize("L", [1, 700])
def test_inputs_have_the_shapes_of_a_layer(module_of, name, L):
    inputs, heads = module_of("inputs"), module_of("cases").Heads(6, 2, 64)
    q, k, v = getattr(inputs, name)(heads, L, device="cpu")
    assert [tuple(x.shape) for x in (q, k, v)] == [(1, 6, L, 64), (1, 2, L, 64), (1, 2, L, 64)]
    assert {x.dtype for x in (q, k, v)} == {torch.bfloat16}
    assert all(x.isfinite().all() for x in (q, k, v))
    again = getattr(inputs, name)(heads, L, device="cpu")
    assert all(torch.equal(a, b) for a, b in zip((q, k, v), again, strict=True))


def test_structured_inputs_keep_about_the_wanted_share_of_blocks(module_of):
    inputs, heads = module_of("inputs"), module_of("cases").Heads(8, 8, 128)
    found = {
        share: densities(*inputs.structured(heads, 16384, share=share, device="cpu")[:2])
        for share in (0.03, 0.12)
    }
    # a tenth of the blocks of a prompt this short is kept whatever the head looks at
    assert 0.05 < found[0.03].mean() < 0.13
    assert 0.12 < found[0.12].mean() < 0.22
    assert found[0.12].max() > 2 * found[0.12].min()


def test_a_slash_head_looks_at_one_distance_through_rope(module_of):
    inputs, heads = module_of("inputs"), module_of("cases").Heads(4, 1, 128)
    q, k, _ = inputs.structured(heads, 4096, device="cpu")
    head = next(i for i, mix in enumerate(inputs.MIXES) if set(mix) == {"slash"})
    rows = torch.arange(3000, 4096)
    logits = q[0, head, rows].float() @ k[0, 0].float().T * 128**-0.5
    logits.masked_fill_(torch.arange(4096) > rows[:, None], float("-inf"))
    mass = logits.softmax(-1)
    distance = (rows[:, None] - torch.arange(4096)).clamp(min=0)
    by_distance = torch.zeros(4096).index_add_(0, distance.flatten(), mass.flatten())
    best = int(by_distance[:-1].argmax())
    assert by_distance[max(best - 16, 0) : best + 17].sum() / len(rows) > 0.7


def test_long_inputs_aim_at_fewer_blocks(module_of):
    share = module_of("inputs").default_share
    assert share(8192) == share(131072) == 0.12
    assert share(524288) == 0.03


def test_a_captured_file_is_tiled_with_its_groups_and_cut_to_the_length(module_of, tmp_path):
    capture, inputs = module_of("capture_qk"), module_of("inputs")
    query, key = torch.randn(9, 300, 64).bfloat16(), torch.randn(3, 300, 64).bfloat16()
    layer = capture.Captured(7, query, key, 64**-0.5, 0.5, 0.9)
    facts = {"model": "m", "text": "code", "length": 300, "trained_length": 200}
    capture.save(layer, tmp_path / "x.safetensors", group=None, **facts)
    got = inputs.load(tmp_path / "x.safetensors", None, 256, device="cpu")
    assert got.query.shape == (1, 36, 256, 64)
    assert got.key.shape == got.value.shape == (1, 12, 256, 64)
    for head in range(36):
        assert torch.equal(got.query[0, head], query[head % 9, :256])
        assert torch.equal(got.key[0, head // 3], key[head % 9 // 3, :256])
    assert got.facts["tiled"] == "9/3 x 4"
    assert (got.facts["model"], got.facts["layer"]) == ("m", 7)
    assert "beyond the 200 tokens" in got.facts["note"]
    assert "note" not in inputs.load(tmp_path / "x.safetensors", None, 200, device="cpu").facts
    with pytest.raises(SystemExit, match="has 300 tokens, 400"):
        inputs.load(tmp_path / "x.safetensors", None, 400, device="cpu")


def test_a_file_may_hold_some_query_heads_of_each_group(module_of, tmp_path):
    capture, inputs = module_of("capture_qk"), module_of("inputs")
    query, key = torch.randn(8, 130, 16).bfloat16(), torch.randn(2, 130, 16).bfloat16()
    facts = {"model": "m", "text": "code", "length": 130, "trained_length": 200}
    layer = capture.Captured(0, query, key, 0.25, 0.5, 0.9)
    capture.save(layer, tmp_path / "x.safetensors", group=1, **facts)
    got = inputs.captured(tmp_path / "x.safetensors", 130, device="cpu")
    assert got.facts["tiled"] == "2/2 x 16"
    assert torch.equal(got.query[0, :2], query[[0, 4]])
