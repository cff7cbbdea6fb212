"""Capturing q, k: from the layers that see the whole prompt, without changing what a model says."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096,
}  # fmt: skip


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=3, **SIZES))


def gemma():
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    config = transformers.Gemma3TextConfig(
        num_hidden_layers=4, layer_types=kinds, sliding_window=100, query_pre_attn_scalar=16,
        **SIZES,
    )  # fmt: skip
    return transformers.Gemma3ForCausalLM(config)


@pytest.mark.parametrize(("make", "layers"), [(llama, [0, 1, 2]), (gemma, [1, 3])])
def test_layers_that_see_the_whole_prompt_are_captured(module_of, monkeypatch, make, layers):
    capture_qk = module_of("capture_qk")
    monkeypatch.setattr(capture_qk, "SLIDING_ROWS", 128)
    model = make().eval()
    ids = torch.randint(300, (700,)).tolist()
    found, hidden = [], []
    with torch.no_grad():
        want = model.base_model(torch.tensor([ids]), use_cache=False).last_hidden_state
    model.base_model.register_forward_hook(lambda *args: hidden.append(args[2].last_hidden_state))
    capture_qk.capture(model, ids, layers=None, on_layer=found.append)
    torch.testing.assert_close(hidden[0], want, atol=1e-4, rtol=1e-4)
    assert [captured.layer for captured in found] == layers
    for captured in found:
        assert captured.query.shape == (4, 700, 16)
        assert captured.key.shape == (2, 700, 16)
        assert captured.scale == 0.25
        assert 0 < captured.density <= 1


def test_the_prompt_stops_after_the_last_wanted_layer(module_of):
    found = []
    module_of("capture_qk").capture(llama().eval(), [1] * 200, layers=[0, 1], on_layer=found.append)
    assert [captured.layer for captured in found] == [0, 1]
