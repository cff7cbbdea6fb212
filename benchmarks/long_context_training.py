"""The parts of a training step: curriculum by time, batches made ahead, the loss, the fastest SDPA.

Every step has the same number of tokens: one sequence of 64k or eight of 8k.
"""

import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from long_context_sequences import train_sequence
from torch.nn.attention import SDPBackend, sdpa_kernel

WARM_UP, LAST_LR = 0.04, 0.05
# Share of steps whose length is one of an earlier phase, so that shorter prompts stay learnt.
SHORTER = 0.25


@dataclass(frozen=True)
class Phase:
    """A length of the curriculum, up to a share in (0, 1] of the time."""

    length: int
    until: float


def phases(said):
    """[Phase] of e.g. "8192:0.25 16384:0.2 32768:0.25 65536:0.3", the shares scaled to sum to 1."""
    parts = [part.split(":") for part in said.split()]
    total, until, result = sum(float(share) for _, share in parts), 0.0, []
    for length, share in parts:
        until += float(share) / total
        result.append(Phase(int(length), until))
    return result


def length_at(plan, share, number, seed):
    """Tokens of the sequences of step `number`, when `share` of the time has passed."""
    now = next((i for i, phase in enumerate(plan) if share < phase.until), len(plan) - 1)
    rng = np.random.default_rng((seed, number))
    if now and rng.random() < SHORTER:
        now = int(rng.integers(now))
    return plan[now].length


def rate_at(share):
    """Factor of the learning rate: a linear warm-up, then half a cosine down to LAST_LR."""
    if share < WARM_UP:
        return max(share / WARM_UP, 0.05)
    turned = math.cos(math.pi * min((share - WARM_UP) / (1 - WARM_UP), 1.0))
    return LAST_LR + (1 - LAST_LR) * (1 + turned) / 2


@dataclass(frozen=True)
class Batch:
    """One step's data; rows are positions in ids.flatten(), each predicting the token after it.

    ids: [B, L]. answer_rows, answer_of: [A], the latter counts answers. plain_rows: [P].
    """

    ids: torch.Tensor
    answer_rows: torch.Tensor
    answer_of: torch.Tensor
    plain_rows: torch.Tensor

    def to(self, device):
        """The batch on a device."""
        return Batch(*(x.to(device, non_blocking=True) for x in vars(self).values()))


def make_batch(text, *, length, tokens, plain, seed, number):
    """Batch `number`: tokens // length sequences; plain: positions of ordinary text with a loss."""
    B = max(tokens // length, 1)
    rng = np.random.default_rng((seed, number, 1))
    rows, of, plain_rows, ids = [], [], [], []
    for b in range(B):
        made = train_sequence(text, length, seed=seed, number=number * 64 + b)
        ids.append(made.ids)
        for start, stop in made.answers:
            of += [of[-1] + 1 if of else 0] * (stop - start)
            rows += range(b * length + start - 1, b * length + stop - 1)
        # a token and its successor both of the text around the needles
        candidates = np.flatnonzero(made.plain[:-1] & made.plain[1:])
        size = min(plain // B, len(candidates))
        plain_rows.append(rng.choice(candidates, size, replace=False) + b * length)
    return Batch(
        torch.from_numpy(np.stack(ids)), torch.tensor(rows), torch.tensor(of),
        torch.from_numpy(np.concatenate(plain_rows)),
    )  # fmt: skip


class Ahead:
    """Batches in the order they are asked for, the next ones made meanwhile on other threads."""

    def __init__(self, make, *, depth=3):
        self.make, self.depth, self.waiting = make, depth, []
        self.pool = ThreadPoolExecutor(depth)
        self.number = 0

    def next(self, length):
        """(length, batch) of the oldest; `length` is that of the batch now put in the queue."""
        while len(self.waiting) <= self.depth:
            self.waiting.append((length, self.pool.submit(self.make, length, self.number)))
            self.number += 1
        length, future = self.waiting.pop(0)
        return length, future.result()

    def close(self):
        """Drop what was not asked for."""
        self.pool.shutdown(wait=True, cancel_futures=True)


def loss_of(network, projections, batch, *, plain_weight):
    """(loss to minimise, its two parts, answers that are right in full, answers)."""
    hidden = network.hidden(batch.ids, projections).flatten(0, 1)
    rows = torch.cat([batch.answer_rows, batch.plain_rows])
    logits = network.logits(hidden[rows])
    target = batch.ids.flatten()[rows + 1]
    losses = F.cross_entropy(logits, target, reduction="none")
    answers, plain = losses.split([len(batch.answer_rows), len(batch.plain_rows)])
    with torch.no_grad():
        right = (logits[: len(answers)].argmax(-1) == target[: len(answers)]).float()
        count = int(batch.answer_of.max()) + 1
        whole = torch.ones(count, device=right.device)
        whole = whole.scatter_reduce(0, batch.answer_of, right, "amin")
    loss = answers.mean() + plain_weight * plain.mean()
    return loss, answers.detach().mean(), plain.detach().mean(), whole.sum(), count


def fastest_attention(*, Hq, Hkv, D, L=32768):
    """(name, attend): the fastest causal SDPA, forward and backward, that agrees with flash.

    Only for CUDA in bf16; a kernel that this torch does not have for these heads is passed over.
    """
    g = torch.Generator("cuda").manual_seed(0)
    # [B, L, H, D] storage, as the projections give it
    q, k, v, grad = (
        torch.randn(1, L, H, D, device="cuda", dtype=torch.bfloat16, generator=g).transpose(1, 2)
        for H in (Hq, Hkv, Hkv, Hq)
    )
    wanted, best = None, None
    for repeat in (True, False):
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            name = f"{backend.name.lower()}{', heads repeated' if repeat else ''}"
            attend = attend_with(backend, Hq // Hkv if repeat else None)
            try:
                got, _ = _run(attend, q, k, v, grad)
                got, seconds = _run(attend, q, k, v, grad)
            except RuntimeError as error:
                print(f"  {name}: {str(error).splitlines()[0][:100]}")
                continue
            wanted = wanted or got
            errors = [float((a - b).norm() / b.norm()) for a, b in zip(got, wanted, strict=True)]
            print(f"  {name}: {seconds * 1e3:.1f} ms at {L}, error {max(errors):.1e}", flush=True)
            if max(errors) < 2e-2 and (best is None or seconds < best[0]):
                best = seconds, name, attend
    if best is None:
        raise RuntimeError("neither flash nor cuDNN attention runs forward and backward here")
    return best[1:]


def attend_with(backend, repeat=None):
    """Causal attention by one backend of SDPA, each KV head repeated so often; None: grouped."""

    def attend(q, k, v):
        if repeat:
            k, v = (x.repeat_interleave(repeat, 1) for x in (k, v))
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=repeat is None
            )  # fmt: skip

    return attend


def _run(attend, q, k, v, grad):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    torch.cuda.synchronize()
    start = time.perf_counter()
    out = attend(*leaves)
    out.backward(grad)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return [x.float() for x in (out.detach(), *(leaf.grad for leaf in leaves))], seconds
