"""The demo runs from end to end, and its result reads as it should."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from crisp_flex.demo.errors import DemoError
from crisp_flex.demo.run import DemoOptions, DemoResult, describe, run

RESULT = DemoResult(
    model="tiny",
    device="cpu",
    dtype="float32",
    length_tokens=4096,
    pass_key="71432",
    pass_key_position=2028,
    policy="hybrid",
    preset="balanced",
    dense_answer="71432.",
    dense_right=True,
    sparse_answer="9.",
    sparse_right=False,
    same_answer=False,
    positions=1024,
    kl=0.01234,
    top1_agreement=0.975,
    density=0.333,
    density_by_layer=[0.25, 0.416] * 6,
    load_s=1.0,
    dense_prompt_s=16.0,
    first_sparse_prompt_s=80.0,
    sparse_prompt_s=12.5,
    sites=12,
    sites_rewritten=12,
    reasons=[],
    picture="/tmp/masks.png",
    report="/tmp/masks.html",
)


def test_the_text_has_both_answers_and_every_number():
    text = describe(RESULT)
    for part in ("'71432.'", "'9.'", "0.0123", "97.5%", "33.3%", "16.00 s", "12.50 s"):
        assert part in text
    assert "12 of 12" in text
    assert "/tmp/masks.png" in text
    assert "/tmp/masks.html" in text


def test_every_layer_has_a_number():
    rows = [
        line for line in describe(RESULT).splitlines() if line.lstrip().startswith(("0:", "10:"))
    ]
    numbers = [int(word) for line in rows for word in line.split(":")[1].split()]
    assert numbers == [25, 42] * 6


def test_a_run_without_sparse_calls_says_why():
    dense = dataclasses.replace(
        RESULT,
        density=None,
        density_by_layer=[],
        sites_rewritten=0,
        reasons=["too short"],
        picture=None,
    )
    text = describe(dense)
    assert "left dense: too short" in text
    assert "Nothing ran sparsely." in text


def test_no_picture_names_the_extra():
    assert "crisp-flex[bench]" in describe(dataclasses.replace(RESULT, picture=None))


@pytest.fixture
def byte_llama(tmp_path):
    """A folder with a random two-layer Llama and a tokenizer with one token a byte."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("matplotlib")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    folder = tmp_path / "byte-llama"
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        eos_token_id=None,
        bos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["hybrid", "dense"])
def test_a_run_reports_what_the_sparse_path_did(byte_llama, tmp_path, capsys, policy):
    options = DemoOptions(
        model=str(byte_llama), device="cpu", length=1100, policy=policy, output=tmp_path, json=True
    )
    result = run(options)
    assert json.loads(capsys.readouterr().out) == dataclasses.asdict(result)
    assert (result.sites, result.sites_rewritten, result.reasons) == (2, 2, [])
    assert len(result.density_by_layer) == 2
    assert (tmp_path / f"crisp-flex-{policy}-1100.png").is_file()
    assert "model.layers.1.self_attn" in Path(result.report).read_text()
    if policy == "dense":
        assert result.density == 1.0
        assert result.kl < 1e-6
        assert result.sparse_answer == result.dense_answer
    else:
        assert 0.0 < result.density <= 1.0
        assert torch.isfinite(torch.tensor(result.kl))


def test_a_length_the_model_cannot_take_is_one_sentence(byte_llama):
    with pytest.raises(DemoError, match="at most 2048 tokens"):
        run(DemoOptions(model=str(byte_llama), device="cpu", length=4096))
