"""What masks cost: an all-ones mask against none, and windows, chunks and documents against dense.

    python benchmarks/bench_masks.py [--length 32768] [--layers 4] [--out FILE]

"ones": whole random models (SmolLM2-135M's and Llama 3.1 8B's shape) compiled by crisp_flex, the
same prompt without attention_mask and with one of ones: both are routed alike, so time and peak
memory should be equal. The others: attention alone (Llama 3.1 8B's heads) under a mask that the
graph builds, as transformers writes it; dense is the same function compiled by Inductor. Each pair
is timed in turns in one process.
"""

import argparse
import gc

import torch
import torch.nn.functional as F
from timing import in_turns, medians, peak_mib, where, write_rows

import crisp_flex
from crisp_flex import CrispConfig, CrispFlexBackend, torch_internals

# name: (hidden, intermediate, layers, Hq, Hkv, D)
MODELS = {
    "SmolLM2-135M": (576, 1536, 30, 9, 3, 64),
    "Llama 3.1 8B": (4096, 14336, 4, 32, 8, 128),
}
WINDOW, CHUNK, DOCUMENT = 4096, 8192, 4096


def model_of(name, args):
    """A random Llama of that shape, in eval mode."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, intermediate, layers, Hq, Hkv, D = MODELS[name]
    config = LlamaConfig(
        hidden_size=hidden // args.divide,
        intermediate_size=intermediate // args.divide,
        num_hidden_layers=args.layers or layers,
        num_attention_heads=Hq,
        num_key_value_heads=Hkv,
        head_dim=D,
        vocab_size=32000 // args.divide,
        max_position_embeddings=2 * args.length,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    return model.to(args.device, args.dtype).eval()


def ones_rows(name, args):
    """Calls without a mask and with one of ones."""
    config = CrispConfig(min_seqlen=args.min_seqlen)
    ids = torch.randint(3, 300, (1, args.length), device=args.device)
    mask = torch.ones_like(ids)
    model = crisp_flex.compile(model_of(name, args), config)
    # of the logits only the last row, as a prompt step has it
    keep = {"use_cache": True, "logits_to_keep": 1}
    calls = {
        "none": lambda: model(input_ids=ids, **keep),
        "ones": lambda: model(input_ids=ids, attention_mask=mask, **keep),
    }
    rows = compared(f"ones, {name}", calls, args)
    sparse = [len(report.rewritten) for report in crisp_flex.reports(model)]
    return [{**row, "sparse_calls": sparse} for row in rows]


def layer(kind):
    """SDPA under the causal mask and a window, chunks of positions, or documents."""

    def allowed(q, k, ids):
        if kind == "window":
            return k > q - WINDOW
        if kind == "chunks":
            return k // CHUNK == q // CHUNK
        return ids[0, q] == ids[0, k]

    def fn(query, key, value, ids):
        tokens = torch.arange(query.shape[2], device=query.device)
        q, k = tokens[None, None, :, None], tokens[None, None, None, :]
        mask = (k <= q) & allowed(q, k, ids)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)

    return fn


def layer_rows(kind, args):
    """The layer by Inductor and by crisp_flex; both must give the same."""
    _, _, _, Hq, Hkv, D = MODELS["Llama 3.1 8B"]
    torch._dynamo.reset()
    gen = torch.Generator(args.device).manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, args.length, D, generator=gen, device=args.device, dtype=args.dtype)
        for heads in (Hq, Hkv, Hkv)
    )
    ids = (torch.arange(args.length, device=args.device) // DOCUMENT)[None]
    backend = CrispFlexBackend(CrispConfig(min_seqlen=args.min_seqlen))
    fns = {
        "dense": torch_internals.compile_apart(layer(kind), "inductor"),
        "crisp_flex": torch_internals.compile_apart(layer(kind), backend),
    }
    calls = {how: lambda fn=fn: fn(q, k, v, ids) for how, fn in fns.items()}
    dense, sparse = (call().float() for call in calls.values())
    error = ((sparse - dense).norm() / dense.norm()).item()
    del dense, sparse
    sites = [site for report in backend.reports.values() for site in report.sites]
    how = sites[0].policy or str(sites[0].rejection)
    return [{**row, "policy": how, "error": error} for row in compared(kind, calls, args)]


def compared(what, calls, args):
    """A row a call: median milliseconds of rounds in turns, and peak MiB."""
    peaks = {}
    for how, call in calls.items():
        call()
        peaks[how] = peak_mib(call)
    times = in_turns(calls, rounds=args.rounds, repeats=args.repeats)
    middle = medians(times)
    return [
        {
            "row": what,
            "how": how,
            "length": args.length,
            "ms": middle[how],
            "ms_rounds": times[how],
            "peak_mib": peaks[how],
        }
        for how in calls
    ]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    kinds = [*MODELS, "window", "chunks", "documents"]
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=None, help="of the models; default: 30, 4")
    parser.add_argument("--min-seqlen", type=int, default=None, help="default: CrispConfig's")
    parser.add_argument("--divide", type=int, default=1, help="smaller models, for a trial")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", default=None, help="append rows as JSON lines")
    args = parser.parse_args()
    args.dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    with torch.no_grad():
        for what in args.only:
            rows = ones_rows(what, args) if what in MODELS else layer_rows(what, args)
            for row in rows:
                print(row, flush=True)
            if args.out:
                write_rows([{**where(), **row} for row in rows], args.out)
            gc.collect()  # a model and its graphs hold each other


if __name__ == "__main__":
    main()
