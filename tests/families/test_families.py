"""Families of models times calls: rewritten as the table in docs/families.md says, logits right."""

import pytest
import torch
from masked_attention import relative_error

transformers = pytest.importorskip("transformers")

import crisp_flex  # noqa: E402
from crisp_flex import Reason, mask_mods  # noqa: E402
from crisp_flex.passes import eligibility, plan  # noqa: E402
from crisp_flex.passes.pipeline import run_passes  # noqa: E402
from tests.families import table  # noqa: E402
from tests.families.cells import CONFIG, run  # noqa: E402
from tests.families.models import CALLS, FAMILIES, make  # noqa: E402

# The calls that differ most; the script that writes the table runs all.
QUICK = ("left padding", "static second turn")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_served_as_the_table_says(family):
    committed = table.read()
    for call in QUICK:
        cell = run(family, call)
        assert cell.error < 1e-5, call
        assert str(cell) == committed[family][call], call


@pytest.mark.parametrize("call", CALLS)
def test_every_call_of_a_model_with_a_window_is_right(call):
    cell = run("Gemma 3 text", call)
    assert cell.error < 1e-5
    assert str(cell) == table.read()["Gemma 3 text"][call]


@pytest.mark.parametrize("family", ["Llama", "Gemma 3 text"])
@pytest.mark.parametrize("call", ["left padding", "second turn", "static second turn"])
def test_the_same_holds_for_dynamic_lengths(family, call, monkeypatch):
    """As on CUDA: there a padding mask with dynamic shapes compiles."""

    def but_for_the_cpu(test):
        return lambda site: (no for no in test(site) if no.reason is not Reason.CPU_DYNAMIC_PADDING)

    tests = tuple(but_for_the_cpu(test) for test in eligibility._TESTS)
    monkeypatch.setattr(eligibility, "_TESTS", tests)
    cell = run(family, call, dynamic=True)
    assert cell.error < 1e-5
    assert str(cell) == table.read()[family][call]


@pytest.mark.parametrize("family", ["Llama", "Llama 4 text"])
def test_a_left_padded_row_equals_that_prompt_alone(family):
    """Positions are relative here, so that those counted from the padding on do not matter."""

    def backend(gm, example_inputs):
        assert all(site.rewritten for site in run_passes(gm, CONFIG).sites)
        return gm.forward

    model, call = make(family), CALLS["left padding"](None)
    with torch.no_grad():
        got = torch.compile(model, backend=backend, dynamic=False)(**call.kwargs).logits
        for tokens, valid, row in zip(call.kwargs["input_ids"], call.rows, got, strict=True):
            alone = model(input_ids=tokens[valid][None], use_cache=False).logits[0]
            assert relative_error(row[valid], alone) < 1e-5


def test_the_table_has_every_cell():
    committed = table.read()
    assert list(committed) == list(FAMILIES)
    for cells in committed.values():
        assert list(cells) == list(CALLS)
        assert "no SDPA call" not in cells.values()


@pytest.mark.parametrize(
    ("family", "call"),
    [
        ("Falcon", "left padding"),
        ("Gemma 3 text", "plain"),
        ("Llama", "chunk"),
        ("Llama", "static second turn"),
    ],
)
def test_a_wrong_mask_would_show(family, call, monkeypatch):
    """The check is sharp: with a mask_mod that is causal from the first key on, logits differ."""

    def careless(*, offset, window, padded, same):
        right = mask_mods.mask_mod(offset=offset, window=window, padded=padded, same=same)
        if offset is None or padded:
            captured = (None,) * ((offset is None) + padded)
            wrong = {1: lambda b, h, q, kv, x: q >= kv, 2: lambda b, h, q, kv, x, y: q >= kv}
            chosen = wrong[len(captured)]
        else:
            chosen = lambda b, h, q, kv: q >= kv  # noqa: E731
        chosen.__name__ = right.__name__
        return chosen

    monkeypatch.setattr(plan, "mask_mod", careless)
    assert run(family, call).error > 1e-3


@pytest.mark.parametrize("family", ["Whisper", "Bart", "T5"])
def test_encoders_and_cross_attention_stay_dense(family):
    sizes = {"vocab_size": 128, "d_model": 32, "decoder_start_token_id": 1, "pad_token_id": 0}
    layers = {"encoder_layers": 1, "decoder_layers": 1}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    lengths = {"max_source_positions": 64, "max_target_positions": 128, "num_mel_bins": 8}
    settings = {
        "Whisper": {**layers, **heads, **lengths, "bos_token_id": 1, "eos_token_id": 2},
        "Bart": {**layers, **heads},
        "T5": {"d_kv": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2},
    }[family]
    config = getattr(transformers, f"{family}Config")(**sizes, **settings)
    kind = getattr(transformers, f"{family}ForConditionalGeneration")
    model = kind._from_config(config, attn_implementation="sdpa").eval()
    tokens = torch.arange(3, 51)[None]
    inputs = {"input_ids": torch.arange(3, 67)[None]}
    if family == "Whisper":
        inputs = {"input_features": torch.randn(1, 8, 128)}
    with torch.no_grad():
        found = crisp_flex.explain(model, config=CONFIG, decoder_input_ids=tokens, **inputs)
    encoder, decoder, cross = found.report.sites
    if family == "T5":  # its position bias is added to the logits
        reasons = [Reason.FLOAT_MASK, Reason.FLOAT_MASK, Reason.MASK_NOT_CAUSAL]
        assert [site.rejection.reason for site in found.report.sites] == reasons
    else:
        assert encoder.rejection.reason is cross.rejection.reason is Reason.NOT_CAUSAL
        assert decoder.mask == "causal"
        assert decoder.rewritten
