"""Extend SmolLM2-135M-Instruct from 8k to 64k tokens: an adapter that makes it retrieve there.

    python benchmarks/long_context_text.py --model smol.gguf        # once, where tokenising is free
    python benchmarks/train_long_context.py --model smol.gguf --seconds 480 --out OUT

--seconds is wall time from the start of the script to the end of training, loading and compiling
included; the curriculum and the learning rate follow the share of it that has passed. Evaluation
comes on top (--eval-seconds). OUT gets adapter.safetensors, rewritten every minute, and
results.jsonl. A second call goes on with --resume OUT/adapter.safetensors and shorter --phases.

RoPE's theta: NTK arithmetic for a factor of 8 gives 1e5 * 8 ** (64 / 62) = 8.6e5; the lower bound
of Base of RoPE Bounds Context Length (arXiv:2405.14591, its fit 0.0424 * L ** 1.628) is 1.0e5 at
8k, which is SmolLM2's own, and 2.9e6 at 64k. The default is 3e6.
"""

import argparse
import math
import time
from collections import defaultdict
from pathlib import Path

import torch
from long_context_adapter import Adapter, Facts
from long_context_eval import retrieval, text_loss
from long_context_network import Network, causal
from long_context_text import DEFAULT, KINDS, read
from long_context_training import (
    Ahead,
    attend_with,
    fastest_attention,
    length_at,
    loss_of,
    make_batch,
    phases,
    rate_at,
)
from timing import where, write_rows
from torch.nn.attention import SDPBackend

THETA = 3e6
PHASES = "4096:0.1 8192:0.15 16384:0.15 32768:0.25 65536:0.35"
EVAL_LENGTHS = (65536, 32768, 16384, 8192, 49152)


def main():
    start = time.perf_counter()
    args = parse()
    # slow to import, and --help does not need it
    from crisp_flex.demo.model import load

    cuda = args.device == "cuda"
    loaded = load(args.model, device=args.device, dtype=torch.bfloat16 if cuda else torch.float32)
    text = read(args.text)
    passed = f"{time.perf_counter() - start:.0f} s"
    print(f"{passed}: {loaded.name} and {args.text} loaded", flush=True)
    theta = float(loaded.model.config.rope_parameters["rope_theta"])
    # lengths vary where nothing is trained, and cuDNN plans anew for each
    dense = attend_with(SDPBackend.FLASH_ATTENTION) if cuda else causal
    base, attend = Network(loaded.model, theta=theta, attend=dense), causal
    if cuda:
        name, attend = fastest_attention(Hq=base.Hq, Hkv=base.Hkv, D=base.D)
        print(f"attention: {name}", flush=True)
    plan = phases(args.phases)
    if args.resume:
        adapter, facts = Adapter.read(args.resume, base.projections)
        length = max(facts.length, *(phase.length for phase in plan))
        facts = Facts(facts.rope_theta, length, facts.history)
    else:
        adapter = Adapter(base.projections, Hq=base.Hq, rank=args.rank, seed=args.seed)
        facts = Facts(args.theta, max(phase.length for phase in plan))
    theta = facts.rope_theta
    if args.seconds > 0:
        compiled = cuda and not args.eager
        network = Network(loaded.model, theta=theta, attend=attend, compiled=compiled)
        train(network, adapter, text, plan, facts, args, start)
    evaluate(Network(loaded.model, theta=theta, attend=dense), adapter, base, text, args)


def train(network, adapter, text, plan, facts, args, start):
    """Train until --seconds have passed since `start`, and write the adapter."""
    path, seed = args.out / "adapter.safetensors", args.seed + 1000 * len(facts.history)

    def make(length, number):
        return make_batch(
            text, length=length, tokens=args.tokens, plain=args.plain, seed=seed, number=number
        )

    def backward(batch):
        merged = adapter.merged(network.projections)
        found = loss_of(network, merged, batch.to(args.device), plain_weight=args.plain_weight)
        found[0].backward()
        return found[1:]

    optimizer = torch.optim.AdamW(
        [
            {"params": [*adapter.down, *adapter.up], "share": 1.0},
            # a few numbers that have far to go
            {"params": [adapter.log_gain], "share": 3.0},
        ],
        lr=args.lr, betas=(0.9, 0.98), weight_decay=0.0,
    )  # fmt: skip
    # compiled, and its memory found out, before the learning rate starts to fall
    backward(make(plan[-1].length, 0))
    optimizer.zero_grad()
    ahead, log, step, skipped = Ahead(make), Log(args.print_seconds), 0, 0
    began = saved = time.perf_counter()
    print(f"{began - start:.0f} s: training begins; {_peak()}", flush=True)
    while (now := time.perf_counter()) - start < args.seconds:
        share = (now - began) / max(args.seconds - (began - start), 1e-9)
        length, batch = ahead.next(length_at(plan, share, step, seed))
        for group in optimizer.param_groups:
            group["lr"] = args.lr * rate_at(share) * group["share"]
        answers, plain, right, count = backward(batch)
        norm = float(torch.nn.utils.clip_grad_norm_(adapter.parameters(), 1.0))
        if math.isfinite(norm):
            optimizer.step()
        skipped += not math.isfinite(norm)
        optimizer.zero_grad()
        step += 1
        log.add(length, answers, plain, right, count, batch.ids.numel())
        if log.due():
            gain = float(adapter.log_gain.detach().exp().mean())
            lr = args.lr * rate_at(share)
            print(f"{now - start:6.1f} s step {step:4d} lr {lr:.1e} norm {norm:6.2f} "
                  f"gain {gain:.3f} {log.line()}", flush=True)  # fmt: skip
        if now - saved > args.save_seconds:
            adapter.save(path, facts)
            saved = now
    ahead.close()
    seconds = round(time.perf_counter() - began, 1)
    run = {
        "steps": step, "skipped": skipped, "seconds": seconds, "phases": args.phases,
        "lr": args.lr, "tokens_per_step": args.tokens, "plain_weight": args.plain_weight,
        "seed": seed, "machine": where()["machine"], "torch": torch.__version__,
    }  # fmt: skip
    facts = Facts(facts.rope_theta, facts.length, (*facts.history, run))
    adapter.save(path, facts)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB after {step} steps; {_peak()}", flush=True)


class Log:
    """Losses and whole answers right since the last line, by length."""

    def __init__(self, every_seconds):
        self.every, self.last = every_seconds, time.perf_counter()
        self.sums, self.tokens = defaultdict(lambda: [0.0] * 5), 0

    def add(self, length, answers, plain, right, count, tokens):
        """Add a step; the tensors stay on their device until a line is printed."""
        new = (answers, plain, right, count, 1)
        self.sums[length] = [a + b for a, b in zip(self.sums[length], new, strict=True)]
        self.tokens += tokens

    def due(self):
        """Whether it is time for a line."""
        return time.perf_counter() - self.last >= self.every

    def line(self):
        """The line, and start anew."""
        parts = []
        for length, sums in sorted(self.sums.items()):
            answers, plain, right, count, steps = map(float, sums)
            parts.append(f"[{length}: answers {answers / steps:.3f} text {plain / steps:.3f} "
                         f"right {right / count:.2f} of {count:.0f}]")  # fmt: skip
        speed = self.tokens / (time.perf_counter() - self.last)
        self.__init__(self.every)
        return f"{speed / 1e3:.1f}k tok/s {' '.join(parts)}"


def evaluate(network, adapter, base, text, args):
    """Print rows and append them to results.jsonl, the longest length first."""
    until = time.perf_counter() + args.eval_seconds
    with torch.no_grad():
        merged = adapter.merged(network.projections)

    def emit(row):
        if row:
            print(row, flush=True)
            write_rows([{**where(), **row}], args.out / "results.jsonl")

    def look(task, samples):
        for L in args.eval_lengths:
            emit(
                retrieval(
                    network, merged, text, L, task=task, samples=samples,
                    device=args.device, until=until,
                )
            )  # fmt: skip

    look("multi", args.samples)
    for kind in KINDS:
        emit(
            text_loss(
                network, merged, (base, base.projections), text, args.text_length, kind=kind,
                device=args.device,
            )
        )  # fmt: skip
    # one prefix a question
    look("single", -(-args.samples // 3))


def _peak():
    if not torch.cuda.is_available():
        return "on the CPU"
    return f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--model", help="SmolLM2's .gguf file or folder; default: the demo's, downloaded")
    add("--text", type=Path, default=DEFAULT, help="file of long_context_text.py")
    add("--out", type=Path, default=Path(".carry/long_context"), help="folder")
    add("--resume", type=Path, help="adapter to go on with; its theta and rank stay")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--seconds", type=float, default=480, help="0: evaluate only")
    add("--eval-seconds", type=float, default=75)
    add("--phases", default=PHASES, help=f"length:share of the time ...; default {PHASES}")
    add("--theta", type=float, default=THETA)
    add("--rank", type=int, default=32)
    add("--lr", type=float, default=5e-4)
    add("--tokens", type=int, default=65536, help="of a step")
    add("--plain", type=int, default=2048, help="positions of ordinary text with a loss")
    add("--plain-weight", type=float, default=0.2)
    add("--samples", type=int, default=96, help="questions a length; a third for one fact alone")
    add("--eval-lengths", type=int, nargs="+", default=EVAL_LENGTHS)
    add("--text-length", type=int, default=8192)
    add("--print-seconds", type=float, default=5)
    add("--save-seconds", type=float, default=60)
    add("--seed", type=int, default=0)
    add("--eager", action="store_true", help="no torch.compile")
    return parser.parse_args()


if __name__ == "__main__":
    main()
