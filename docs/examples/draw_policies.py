"""The blocks that each policy keeps on one head of SmolLM2, as docs/policies.png has them.

    python docs/examples/draw_policies.py [--length 4096] [--layer 15] [--out policies.png]

A minute of processor time. Queries, keys and values of one layer are caught on their way into
attention, each policy selects on them, and `record(audit=8)` measures the true attention mass that
it keeps.
"""

import argparse

import torch
import transformers
from matplotlib.figure import Figure
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

import crisp_flex
from crisp_flex.config import POLICIES
from crisp_flex.demo.model import load
from crisp_flex.demo.prompt import text_ids
from crisp_flex.record_plot import draw_blocks

# MInference's budgets are meant for 128k tokens and would keep nearly all of a short prompt.
BUDGETS = {"minference": {"vertical_tokens": 512, "slash_tokens": 1024}}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--layer", type=int, default=15)
    parser.add_argument("--out", default="policies.png")
    args = parser.parse_args()

    loaded = load(None, device="cpu", dtype=torch.float32)
    ids = torch.tensor([text_ids(loaded.tokenizer, "code", args.length)])
    query, key, value = caught(loaded.model, ids, args.layer)
    head = middle_head(query, key, value)

    columns = 3
    rows = -(-len(POLICIES) // columns)
    figure = Figure(figsize=(3 * columns, 3.3 * rows), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.12)  # titles above are two lines
    figure.suptitle(f"{loaded.name}, layer {args.layer}, head {head}, {args.length} tokens of code")
    for number, policy in enumerate(POLICIES):
        # max_uncovered=1: each policy as it is, with no head sent dense by the guard
        config = crisp_flex.CrispConfig(policy=policy, max_uncovered=1.0, **BUDGETS.get(policy, {}))
        with crisp_flex.record(audit=8, heads=(head,)) as rec:
            crisp_flex.route(query, key, config, value=value)
        row = rec.rows[0]
        axes = figure.add_subplot(rows, columns, number + 1)
        draw_blocks(axes, row.masks[head])
        kept, mass = row.density_by_head[head], row.mass[head]
        axes.set_title(f"{policy}\n{kept:.1%} of the blocks, {mass:.3f} of the mass", fontsize=9)
        print(f"{policy:12} kept {kept:.3f}, mass {mass:.3f}")
    figure.savefig(args.out, dpi=80)


@torch.no_grad()
def caught(model, ids, layer):
    """Query [1, Hq, L, D], key and value [1, Hkv, L, D] of one layer, as attention gets them."""
    found = {}

    def catching(module, query, key, value, *args, **kwargs):
        if module.layer_idx == layer:
            found["qkv"] = query, key, value
        return sdpa_attention_forward(module, query, key, value, *args, **kwargs)

    transformers.AttentionInterface.register("catching", catching)
    AttentionMaskInterface.register("catching", sdpa_mask)
    model.set_attn_implementation("catching")
    model(ids, use_cache=False, logits_to_keep=1)
    return found["qkv"]


def middle_head(query, key, value):
    """The head with the middle density under the default policy."""
    with crisp_flex.record() as rec:
        crisp_flex.route(query, key, value=value)
    density = rec.rows[0].density_by_head
    return sorted(range(len(density)), key=density.__getitem__)[len(density) // 2]


if __name__ == "__main__":
    main()
