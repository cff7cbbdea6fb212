"""Ways of using a Transformers model that nobody announces: each as eager, its prompt sparse.

Graphs run as they are rewritten, without Inductor: with policy "dense" that is exact.
"""

import pytest
import torch
import transformers
from masked_attention import relative_error

import crisp_flex
from crisp_flex import CrispConfig
from tests.families.models import LENGTH, ids, make, ones

pytestmark = pytest.mark.usefixtures("without_inductor")
CONFIG = CrispConfig(min_seqlen=32, block_size=(16, 16), policy="dense")
NEW = {"max_new_tokens": 2, "min_new_tokens": 2, "do_sample": False}


def llama():
    return make("Llama", num_hidden_layers=1)


def right_padded():
    mask = ones(LENGTH, 2)
    mask[0, -30:] = 0
    return {"input_ids": ids(batch=2).where(mask.bool(), 0), "attention_mask": mask}


def left_padded():
    mask = ones(LENGTH, 2)
    mask[0, :20] = 0
    return {"input_ids": ids(batch=2), "attention_mask": mask}


def embedded(model, **kwargs):
    return model.generate(inputs_embeds=model.get_input_embeddings()(ids()), **NEW, **kwargs)


def sampled(model):
    torch.manual_seed(3)
    return model.generate(ids(), **{**NEW, "do_sample": True}, num_return_sequences=3)


def cut_back(model):
    """A chat whose last turn is taken back and asked anew."""
    cache = transformers.DynamicCache(config=model.config)
    model(ids(), past_key_values=cache)
    cache.crop(50 - LENGTH)
    return model(ids(60, seed=4), past_key_values=cache).logits


def one_cache_for_two_prompts(model):
    cache = transformers.StaticCache(config=model.config, max_cache_len=2 * LENGTH)
    first = model(ids(), past_key_values=cache).logits
    cache.reset()
    return torch.cat([first, model(ids(70, seed=9), past_key_values=cache).logits], 1)


def all_layers(model):
    return torch.cat(model(ids(), output_hidden_states=True).hidden_states, -1)


def under_inference_mode(model):
    with torch.inference_mode():
        return model(ids(), logits_to_keep=torch.tensor([3, 90])).logits.clone()


# use: function of the model, rewritten calls of its one layer
USES = {
    "prompt lookup": (lambda model: model.generate(ids(), prompt_lookup_num_tokens=3, **NEW), 1),
    "beams of a padded batch": (
        lambda model: model.generate(**left_padded(), num_beams=2, **NEW),
        1,
    ),
    "embeddings in": (embedded, 1),
    "several samples": (sampled, 1),
    "cropped cache": (cut_back, 2),
    "static cache, two prompts": (one_cache_for_two_prompts, 2),
    "hidden states": (all_layers, 1),
    "inference mode": (under_inference_mode, 1),
    "half after compile": (lambda model: (model(ids()), model.half()(ids()).logits)[1], 2),
}


@pytest.mark.parametrize(("use", "sparse"), USES.values(), ids=USES)
def test_a_use_is_as_in_eager_and_its_prompt_is_sparse(use, sparse):
    want = use(llama())
    model = crisp_flex.compile(llama(), CONFIG)
    got = use(model)
    if want.is_floating_point():
        assert relative_error(got.float(), want.float()) < 4 * torch.finfo(want.dtype).eps ** 0.75
    else:
        assert torch.equal(got, want)
    assert sum(len(report.rewritten) for report in crisp_flex.reports(model)) == sparse


def test_a_classifier_reads_the_last_token_before_the_padding():
    config = llama().config
    config.num_labels = 3
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    want = model(**right_padded()).logits
    crisp_flex.compile(model, CONFIG)
    assert relative_error(model(**right_padded()).logits, want) < 1e-5
    assert [site.mask for site in crisp_flex.reports(model)[0].rewritten] == ["causal + padding"]
