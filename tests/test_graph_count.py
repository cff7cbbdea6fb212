"""The graphs of a model over many lengths and batch sizes: few, and all there after four calls.

What Dynamo itself adds: a size of 1 is always a graph of its own (batch 1, decode), and the first
length is compiled as a number before a second one makes lengths symbolic. Graphs run as rewritten.
"""

import pytest
import torch

import crisp_flex
from crisp_flex import CrispConfig, torch_internals

pytest.importorskip("transformers")
from tests.families.models import ids, make

CONFIG = CrispConfig(min_seqlen=32, block_size=(16, 16), policy="dense")
# (batch, length): the first four calls, then 20 lengths at both batch sizes, no two alike
FIRST = [(1, 96), (1, 112), (4, 80), (4, 128)]
LATER = [(B, L + B) for L in range(64, 184, 12) for B in (1, 4)]


def tiny():
    sizes = {"hidden_size": 32, "intermediate_size": 32, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return make("Llama", num_hidden_layers=1, **sizes, **heads)


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_twenty_lengths_at_two_batch_sizes_add_no_graph_after_four_calls(monkeypatch):
    monkeypatch.setattr(torch_internals, "compile_with_inductor", lambda gm, *_: gm.forward)
    model = crisp_flex.compile(tiny(), CONFIG)
    with torch.no_grad():
        for B, L in FIRST:
            model(input_ids=ids(L, batch=B))
        after_four = graphs()
        for B, L in LATER:
            model(input_ids=ids(L, batch=B))
    assert graphs() == after_four <= 4
    assert all(len(report.rewritten) == 1 for report in crisp_flex.reports(model))


def test_short_prompts_and_decode_steps_bring_the_count_to_six(monkeypatch):
    monkeypatch.setattr(torch_internals, "compile_with_inductor", lambda gm, *_: gm.forward)
    model = crisp_flex.compile(tiny(), CONFIG)
    with torch.no_grad():
        for L in (96, 112, 20, 130, 25):
            past = model(input_ids=ids(L)).past_key_values
            for _ in range(2):
                model(input_ids=ids(1), past_key_values=past)
    # prompt, symbolic prompt, symbolic short prompt, decode, decode with a symbolic past
    assert graphs() <= 6
