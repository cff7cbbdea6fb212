"""lift_mask on the masks of tiny Transformers models, checked element by element."""

import pytest
import torch
from mask_meaning import is_exact, meaning, number, record

from crisp_flex import CrispConfig
from crisp_flex.passes import eligibility
from crisp_flex.passes.lift_mask import lift_mask
from crisp_flex.passes.match import find_sdpa_sites
from crisp_flex.passes.placement import Placement
from crisp_flex.passes.unrepeat_kv import unrepeat_kv

transformers = pytest.importorskip("transformers")

L = 40  # tokens of a prompt
WINDOW = 16

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# model: config class, further settings
MODELS = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "qwen2": ("Qwen2Config", {}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "num_hidden_layers": 2,
            "head_dim": 8,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "phi3": ("Phi3Config", {}),
}
WINDOWS = {"mistral": [WINDOW], "gemma3": [WINDOW, None]}  # per mask; [None] elsewhere


def make(name):
    config_class, settings = MODELS[name]
    config = getattr(transformers, config_class)(**(SIZES | settings))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return model.eval()


def readings(sites, seen):
    """The readings of the different masks of a graph, in order, each checked element by element."""
    specs = []
    for mask in dict.fromkeys(site.kwargs["attn_mask"] for site in sites):
        spec = lift_mask(mask)
        assert is_exact(spec)
        assert torch.equal(meaning(spec, seen, seen[mask].shape), seen[mask])
        specs.append(spec)
    return specs


def ids(batch=1, length=L):
    return torch.randint(3, 60, (batch, length))


def ones(length=L):
    return torch.ones(1, length, dtype=torch.long)


def left_padded():
    valid = torch.ones(2, L, dtype=torch.long)
    valid[0, :7] = 0
    return valid


CALLS = {
    "no mask": lambda: {"input_ids": ids(), "use_cache": False},
    "all ones": lambda: {"input_ids": ids(), "attention_mask": ones(), "use_cache": False},
    "left padding": lambda: {
        "input_ids": ids(2),
        "attention_mask": left_padded(),
        "use_cache": False,
    },
}


def check_repeats(sites):
    """K and V of every site are repeat_kv of the same G."""
    for site in sites:
        _, key, value = site.args
        plain_key, plain_value, repeats = unrepeat_kv(key, value)
        assert repeats == SIZES["num_attention_heads"] // SIZES["num_key_value_heads"]
        assert plain_key.meta["example_value"].shape[1] == SIZES["num_key_value_heads"]
        assert plain_value.meta["example_value"].shape[1] == SIZES["num_key_value_heads"]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("model", "dynamic"), [*((name, None) for name in MODELS), ("llama", True)]
)
def test_prompts(model, dynamic, call):
    _, sites, seen = record(make(model), dynamic=dynamic, **CALLS[call]())
    assert len(sites) == len(WINDOWS.get(model, [None]))
    specs = readings(sites, seen)
    assert [spec.window for spec in specs] == WINDOWS.get(model, [None])
    for spec in specs:
        assert spec.causal
        assert spec.q_offset == 0
        assert len(spec.padding) == (call != "no mask")
        assert spec.is_plain_causal == (spec.window is None)
        window = "" if spec.window is None else f" + window {WINDOW}"
        assert spec.describe() == f"causal{window}{'' if call == 'no mask' else ' + padding'}"
    check_repeats(sites)


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_static_cache_has_a_limit(dynamic):
    model = make("llama")
    cache = transformers.StaticCache(config=model.config, max_cache_len=L + 24)
    _, sites, seen = record(
        model, dynamic=dynamic, input_ids=ids(), attention_mask=ones(), past_key_values=cache
    )
    (spec,) = readings(sites, seen)
    assert spec.causal
    assert number(spec.kv_limit, spec, seen) == L
    assert not spec.is_plain_causal
    check_repeats(sites)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_a_chunk_after_past_tokens(model, dynamic):
    windows = WINDOWS.get(model, [None])
    model = make(model)
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids(), past_key_values=cache)
    _, sites, seen = record(
        model,
        dynamic=dynamic,
        input_ids=ids(length=24),
        attention_mask=ones(L + 24),
        past_key_values=cache,
    )
    specs = readings(sites, seen)
    assert [spec.window for spec in specs] == windows
    assert all(spec.causal and spec.q_offset != 0 for spec in specs)
    assert not any(spec.is_plain_causal for spec in specs)
    check_repeats(sites)


def test_the_counter_of_a_static_cache_is_volatile():
    model = make("llama")
    cache = transformers.StaticCache(config=model.config, max_cache_len=L + 24)
    with torch.no_grad():
        model(input_ids=ids(), past_key_values=cache)
    _, sites, seen = record(
        model, input_ids=ids(length=24), attention_mask=ones(L + 24), past_key_values=cache
    )
    (spec,) = readings(sites, seen)
    assert spec.volatile
    assert number(spec.q_offset, spec, seen) == L
    assert not spec.is_plain_causal


def test_a_user_mask_is_other():
    mask = torch.ones(L, L, dtype=torch.bool).tril()[None, None]
    _, sites, _ = record(make("llama"), input_ids=ids(), attention_mask=mask, use_cache=False)
    assert lift_mask(sites[0].kwargs["attn_mask"]).other


def test_packed_positions_are_documents():
    position = torch.cat([torch.arange(15), torch.arange(L - 15)])[None]
    _, sites, _ = record(make("llama"), input_ids=ids(), position_ids=position, use_cache=False)
    spec = lift_mask(sites[0].kwargs["attn_mask"])
    assert spec.documents
    assert not spec.is_plain_causal


def test_a_batch_size_that_changes_keeps_the_padding():
    """ids and attention_mask then have symbols of their own for one batch size and one length."""
    found = []

    def backend(gm, example_inputs):
        (site,) = find_sdpa_sites(gm)
        spec = lift_mask(site.attn_mask)
        q, key = (
            x.meta["example_value"] for x in (site.query, unrepeat_kv(site.key, site.value)[0])
        )
        call = eligibility._Call(site, q, key, key, q, spec, CrispConfig(min_seqlen=2))
        symbols = {str(spec.padding[0].source.meta["example_value"].shape[0]), str(q.shape[0])}
        found.append((spec.describe(), len(symbols), eligibility._place(call)))
        return gm.forward

    fn = torch.compile(make("llama"), backend=backend)
    with torch.no_grad():
        for batch, length in ((1, L), (1, L + 4), (4, L)):
            mask = torch.ones(batch, length, dtype=torch.long)
            fn(input_ids=ids(batch, length), attention_mask=mask)
    assert [reading for reading, *_ in found] == ["causal + padding"] * 3
    assert found[-1][1] == 2
    assert all(isinstance(placed, Placement) for *_, placed in found)
