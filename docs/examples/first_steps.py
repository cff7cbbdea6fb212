"""explain, choose and record on a random Llama: 13 s of a CPU, nothing is downloaded.

    python docs/examples/first_steps.py

Nothing is compiled here: selection is called on the model's own queries and keys. smollm2.py
compiles a real model.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import crisp_flex

torch.manual_seed(0)
torch.set_grad_enabled(False)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
).eval()
input_ids = torch.randint(3, 128, (1, 1024))

# 1. Which calls would run sparsely? Prompts under 8192 tokens would not without min_seqlen=512.
config = crisp_flex.CrispConfig(min_seqlen=512)
found = crisp_flex.explain(model, input_ids, config=config)
print(found)
assert len(found.report.rewritten) == 1

# 2. What would be kept? Queries that look at one key far away and at their neighbours: structure
# that selection can find.
L, D = 4096, 64
query, key = torch.randn(1, 4, L, D), torch.randn(1, 2, L, D)
key[:, :, 1000] = 8 * key[:, :, 1000] / key[:, :, 1000].norm(dim=-1, keepdim=True)
query += 4 * key[:, :, 1000:1001].repeat_interleave(2, 1)
with crisp_flex.record(audit=8) as rec:
    mask = crisp_flex.route(query, key, crisp_flex.CrispConfig(policy="hybrid"))
    crisp_flex.route(query, key, crisp_flex.CrispConfig(policy="streaming", max_uncovered=1.0))
print(rec.summary())
hybrid, streaming = rec.rows
print(f"hybrid keeps {hybrid.density:.0%} of the blocks, {min(hybrid.mass):.2f} of the mass")
print(f"streaming keeps {streaming.density:.0%}, {min(streaming.mass):.2f} of the mass")

# 3. mask is a BlockMask: flex_attention(query, key, value, block_mask=mask, enable_gqa=True).
print(f"{mask.sparsity():.0f} % of all blocks are left out, the future included")
