"""Many prompts of random length and batch through one compiled model: memory, graphs, results.

    python benchmarks/soak.py [--prompts 500] [--seconds 85] [--longest 65536]

A small random Llama of transformers takes prompts of 1 to --longest tokens (batch 1 to 4, within
--tokens tokens a call), each with no mask, a mask of ones, left or right padding. Printed, and
judged by the exit status:
  graphs   none is compiled after the first 20 prompts
  memory   what is allocated after a call stays within 1 % from then on
  results  every 25th call is repeated uncompiled and dense with the same mask; policy "dense" in
           the compiled model (the default here) makes that a comparison to rounding, --policy
           hybrid shows what the selection costs and judges nothing but finite numbers
"""

import argparse
import random
import sys
import time

import torch
from timing import where, write_rows

import crisp_flex
from crisp_flex import CrispConfig

EVERY = 25
MASKS = ("none", "ones", "left", "right")
# What makes Dynamo trace a graph of its own: one token, a batch of one, a length on the other side
# of min_seqlen, a mask. (length, batch), each with and without a mask.
KINDS = ((12000, 1), (12500, 2), (13000, 3), (13500, 1), (300, 1), (310, 2), (320, 3), (330, 1))
KINDS += ((1, 1), (1, 2))
WARM = 2 * len(KINDS)


def small_llama(layers, device, dtype):
    """A random Llama with 8 query and 2 key heads of D 64."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=512, intermediate_size=1024, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=2, head_dim=64, pad_token_id=0,
        max_position_embeddings=1 << 18, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config).to(device, dtype).eval()


def prompt(rng, number, longest, most_tokens, device):
    """ids [B, L], attention_mask [B, L] or None, and the name of the mask; lengths log-uniform.

    The first WARM prompts go through KINDS.
    """
    length = min(max(int(longest ** rng.random()), 1), longest)
    batch = rng.randint(1, max(min(4, most_tokens // length), 1))
    kind = rng.choice(MASKS)
    if number < WARM:
        length, batch = KINDS[number % len(KINDS)]
        length, kind = min(length, longest), "none" if number < len(KINDS) else "left"
    ids = torch.randint(3, 500, (batch, length), device=device)
    if kind == "none":
        return ids, None, kind
    mask = torch.ones_like(ids)
    for row in range(batch if kind in ("left", "right") else 0):
        pads = rng.randint(0, length - 1)
        mask[row, :pads] = 0
        if kind == "right":
            mask[row] = mask[row].flip(0)
    return ids, mask, kind


def call(model, ids, mask):
    """Hidden states [B, L, hidden] of the decoder, without the head over all positions."""
    return model.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state


def error_on_valid_rows(got, want, mask):
    """|| got - want || / || want || over the tokens that are no padding."""
    valid = torch.ones(got.shape[:2], device=got.device) if mask is None else mask
    valid = valid.bool()[..., None]
    got, want = (x.float().masked_fill(~valid, 0.0) for x in (got, want))
    return ((got - want).norm() / want.norm().clamp_min(1e-9)).item()


def graphs():
    return torch._dynamo.utils.counters["stats"].get("unique_graphs", 0)


def allocated(device):
    """Bytes held after a call: CUDA's allocator, or the resident memory of this process."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=85, help="stop after so long")
    parser.add_argument("--longest", type=int, default=65536, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=131072, help="most tokens of a batch")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--policy", default="dense")
    parser.add_argument("--min-seqlen", type=int, default=None)
    parser.add_argument("--tolerance", type=float, default=2e-2, help='of policy "dense", bf16')
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default=None, help="append a JSON row to this file")
    args = parser.parse_args()
    dtype = torch.bfloat16 if args.device.startswith("cuda") else torch.float32
    model = small_llama(args.layers, args.device, dtype)
    dense = small_llama(args.layers, args.device, dtype)
    config = CrispConfig(policy=args.policy, min_seqlen=args.min_seqlen)
    crisp_flex.compile(model.model, config)
    rng, start = random.Random(args.seed), time.perf_counter()
    torch.manual_seed(args.seed)
    held, errors, compiled, warm_graphs, done, tokens = [], [], [], 0, 0, 0
    with torch.no_grad():
        while done < args.prompts and time.perf_counter() - start < args.seconds:
            ids, mask, kind = prompt(rng, done, args.longest, args.tokens, args.device)
            before = graphs()
            out = call(model, ids, mask)
            finite = bool(out.isfinite().all())
            if graphs() != before:
                compiled.append((done, list(ids.shape), kind))
            if not finite or done % EVERY == 0:
                error = error_on_valid_rows(out, call(dense, ids, mask), mask)
                errors.append((error if finite else float("inf"), done, list(ids.shape), kind))
            tokens += ids.numel()
            del ids, mask, out
            done += 1
            if done == WARM:
                warm_graphs = graphs()
            if done >= WARM:
                held.append(allocated(args.device))
    seconds = time.perf_counter() - start
    late = graphs() - warm_graphs
    growth = (max(held) - held[0]) / held[0] if held else float("nan")
    worst = max(errors) if errors else (float("nan"), 0, [], "")
    row = {
        **where(), "row": "soak", "prompts": done, "tokens": tokens, "seconds": round(seconds, 1),
        "policy": args.policy, "layers": args.layers, "graphs": graphs(),
        "graphs_after_20": late, "memory_growth": round(growth, 5), "compared": len(errors),
        "worst_error": worst[0], "seed": args.seed,
    }  # fmt: skip
    for name, value in row.items():
        print(f"{name:16} {value}")
    print(f"compiled at      {compiled}\nworst at         {worst[1:]}")
    if args.out:
        write_rows([row], args.out)
    wrong = worst[0] > args.tolerance if args.policy == "dense" else worst[0] == float("inf")
    sys.exit(int(done <= WARM or wrong or late > 0 or not growth < 0.01))


if __name__ == "__main__":
    main()
