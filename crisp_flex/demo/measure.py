"""What the demo measures: an answer, its time, and how far two next-token distributions differ."""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextlib.contextmanager
def each_layer(model: PreTrainedModel, called: Callable[[], None]) -> Iterator[int]:
    """Call `called` after each decoder layer of an uncompiled model, while the block runs.

    Yields:
        The number of layers; 0 where the model does not show them as one list.
    """
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
    count = model.config.num_hidden_layers
    layers: Iterable[torch.nn.Module] = next((m for m in lists if len(m) == count), ())
    hooks = [layer.register_forward_hook(lambda *_: called()) for layer in layers]
    try:
        yield len(hooks)
    finally:
        for hook in hooks:
            hook.remove()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer to a prompt.

    Args:
        ids: Generated token ids, greedy, up to an end token.
        logits: (positions, V), the model's dtype: next-token logits of the prompt's last positions.
        prompt_s: Seconds of the prompt step, from the call to its last kernel.
    """

    ids: list[int]
    logits: Tensor
    prompt_s: float


def _cache_argument(model: PreTrainedModel) -> str:
    """The name under which the model takes its cache; it changed in Transformers 5.24."""
    parameters = inspect.signature(model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.no_grad()
def prompt_step(
    model: PreTrainedModel, ids: list[int], positions: int
) -> tuple[Tensor, Any, float]:
    """Run the prompt through the model as `generate()` does: no mask, with a cache that grows.

    Args:
        model: A causal language model, compiled or not.
        ids: Token ids of the prompt.
        positions: How many of the last positions to return logits for.

    Returns:
        logits: (positions, V), the model's dtype.
        cache: The filled cache.
        seconds: Time of the call, to its last kernel.
    """
    from transformers import DynamicCache

    input_ids = torch.tensor([ids], device=model.device)
    cache = DynamicCache(config=model.config)
    _wait(model.device)
    start = time.perf_counter()
    output = model(
        input_ids, use_cache=True, logits_to_keep=positions, **{_cache_argument(model): cache}
    )
    _wait(model.device)
    return output.logits[0], cache, time.perf_counter() - start


@torch.no_grad()
def answer(
    model: PreTrainedModel, ids: list[int], *, positions: int, max_new_tokens: int = 8
) -> Answer:
    """Answer a prompt greedily.

    Decode steps of a compiled model run uncompiled: they are dense either way, and compiling them
    would cost more than the whole answer.

    Args:
        model: A causal language model, compiled or not.
        ids: Token ids of the prompt.
        positions: How many of the prompt's last positions to keep logits for.
        max_new_tokens: Upper end of the answer, in tokens.
    """
    logits, cache, seconds = prompt_step(model, ids, positions)
    ends = _end_tokens(model)
    generated: list[int] = []
    token = int(logits[-1].argmax())
    with torch.compiler.set_stance("eager_on_recompile"):
        while token not in ends and len(generated) < max_new_tokens:
            generated.append(token)
            following = torch.tensor([[token]], device=model.device)
            output = model(following, use_cache=True, **{_cache_argument(model): cache})
            token = int(output.logits[0, -1].argmax())
    return Answer(ids=generated, logits=logits, prompt_s=seconds)


def _end_tokens(model: PreTrainedModel) -> set[int]:
    config = getattr(model, "generation_config", None) or model.config
    ends = config.eos_token_id
    if ends is None:
        return set()
    return {ends} if isinstance(ends, int) else set(ends)


def kl(dense: Tensor, sparse: Tensor, *, chunk: int = 128) -> float:
    """Mean over positions of KL(dense || sparse) of the next-token distributions, in nats.

    Args:
        dense: (positions, V) logits, any float dtype; computed in float32.
        sparse: (positions, V) logits, on the same device.
        chunk: Positions at a time, so that a large vocabulary fits in memory.
    """
    total = 0.0
    for first in range(0, dense.shape[0], chunk):
        part = slice(first, first + chunk)
        log_p, log_q = dense[part].float().log_softmax(-1), sparse[part].float().log_softmax(-1)
        total += float((log_p.exp() * (log_p - log_q)).sum(-1).double().sum())
    return total / dense.shape[0]


def top1_agreement(dense: Tensor, sparse: Tensor) -> float:
    """Share of positions, in [0, 1], at which both (positions, V) logits share the best token."""
    return float((dense.argmax(-1) == sparse.argmax(-1)).double().mean())
