"""KL, agreement and the answer loop, on distributions and models small enough to know."""

import math

import pytest
import torch

from crisp_flex.demo.measure import answer, each_layer, kl, prompt_step, top1_agreement


def test_kl_of_equal_logits_is_zero():
    logits = torch.randn(300, 50)
    assert kl(logits, logits) == 0.0


def test_kl_ignores_a_constant_added_to_the_logits():
    logits = torch.randn(300, 50, dtype=torch.float64).float()
    assert kl(logits, logits + 3.0) == pytest.approx(0.0, abs=1e-6)


def test_kl_of_known_distributions():
    p, q = [0.5, 0.25, 0.25], [0.25, 0.25, 0.5]
    expected = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    dense = torch.tensor([p, p, q]).log()
    sparse = torch.tensor([q, p, q]).log()
    assert kl(dense, sparse) == pytest.approx(expected / 3, rel=1e-6)


def test_kl_is_of_dense_relative_to_sparse():
    dense, sparse = torch.tensor([[0.9, 0.1]]).log(), torch.tensor([[0.5, 0.5]]).log()
    expected = 0.9 * math.log(1.8) + 0.1 * math.log(0.2)
    assert kl(dense, sparse) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("chunk", [1, 7, 300, 1000])
def test_kl_does_not_depend_on_the_chunk(chunk):
    dense, sparse = torch.randn(300, 50), torch.randn(300, 50)
    assert kl(dense, sparse, chunk=chunk) == pytest.approx(kl(dense, sparse), rel=1e-6)


def test_top1_agreement_is_a_share_of_positions():
    dense = torch.eye(4)
    sparse = torch.eye(4).index_select(0, torch.tensor([0, 1, 3, 2]))
    assert top1_agreement(dense, sparse) == 0.5


@pytest.fixture
def llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def test_the_answer_is_what_generate_gives(llama):
    ids = torch.randint(64, (40,)).tolist()
    expected = llama.generate(
        torch.tensor([ids]), max_new_tokens=6, do_sample=False, pad_token_id=0
    )
    got = answer(llama, ids, positions=8, max_new_tokens=6)
    assert got.ids == expected[0, 40:].tolist()
    assert got.logits.shape == (8, 64)
    assert got.prompt_s > 0


def test_the_answer_ends_before_an_end_token(llama):
    ids = torch.randint(64, (40,)).tolist()
    first = answer(llama, ids, positions=1, max_new_tokens=6).ids
    end = first[-1]
    llama.generation_config.eos_token_id = [end]
    assert answer(llama, ids, positions=1, max_new_tokens=6).ids == first[: first.index(end)]


def test_the_prompt_step_gives_the_logits_of_the_last_positions(llama):
    ids = torch.randint(64, (40,)).tolist()
    logits, cache, _ = prompt_step(llama, ids, 8)
    with torch.no_grad():
        expected = llama(torch.tensor([ids])).logits[0, -8:]
    torch.testing.assert_close(logits, expected)
    assert cache.get_seq_length() == 40


def test_each_layer_is_counted_and_leaves_no_hook_behind(llama):
    calls: list[int] = []
    with each_layer(llama, lambda: calls.append(1)) as layers:
        prompt_step(llama, [1, 2, 3], 1)
    prompt_step(llama, [1, 2, 3], 1)
    assert layers == 2
    assert len(calls) == 2
