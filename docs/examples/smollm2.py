"""Compile SmolLM2-135M-Instruct, record what it keeps, and save the report as HTML.

    python docs/examples/smollm2.py [--length 2048] [--out smollm2.html]

The model comes as a Python package (98 MB, once). Five minutes of processor time with
OMP_NUM_THREADS=2: Inductor compiles 30 layers for the CPU on the first call, which is right there
and not fast.
"""

import argparse
import time

import torch

import crisp_flex
from crisp_flex.demo.model import load
from crisp_flex.demo.prompt import passkey_prompt


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--length", type=int, default=2048, help="tokens of the prompt")
    parser.add_argument("--out", default="smollm2.html", help="the report")
    args = parser.parse_args()
    torch.set_grad_enabled(False)

    loaded = load(None, device="cpu", dtype=torch.float32)
    prompt = passkey_prompt(loaded.tokenizer, args.length, depth=0.3)
    ids = torch.tensor([prompt.ids])
    config = crisp_flex.CrispConfig(min_seqlen=1024)  # so that a prompt for a CPU is long enough

    found = crisp_flex.explain(loaded.model, ids, config=config, use_cache=False, logits_to_keep=1)
    print(f"{len(found.report.rewritten)} of {len(found.report.sites)} calls will run sparsely")

    model = crisp_flex.compile(loaded.model, config)
    start = time.perf_counter()
    with crisp_flex.record(audit=4, model=model) as rec:
        tokens = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False
        )
    print(f"answered in {time.perf_counter() - start:.0f} s, compilation included")
    print("the pass key is", prompt.answer)
    print("the answer is  ", loaded.tokenizer.decode(tokens[0, ids.shape[1] :]))
    print(rec.summary())
    rec.save_html(args.out)
    print("open", args.out)


if __name__ == "__main__":
    main()
