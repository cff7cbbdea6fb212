"""Pass 1: find every SDPA call and bind its arguments by name; reads only."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from crisp_flex import huggingface_op

# F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention, one object; the aten
# overload stands in exported programs.
SDPA_TARGETS = frozenset(
    {F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default}
)
# SDPA with a soft cap or sinks, from `crisp_flex.huggingface`.
OWN_TARGET = torch.ops.crisp_flex.attention.default


@dataclass(frozen=True, slots=True)
class SdpaSite:
    """One SDPA call: its node, its place in the model, and its arguments by name.

    Args:
        index: Number of the call in its graph, from 0.
        node: The call.
        module_path: Path of the calling module as `named_modules()` spells it, "" if not known.
        nested: True where the call stands in a graph inside the graph.
        query: [B, Hq, Lq, D].
        key: [B, Hkv, Lkv, D].
        value: [B, Hkv, Lkv, Dv].
        attn_mask: A node, or None.
        dropout_p: A number, or a node where it is computed.
        is_causal: Top-left aligned causality, as SDPA defines it.
        scale: A number, None for 1/sqrt(D), or a node (dynamic shapes turn floats into inputs).
        enable_gqa: Hkv may be a divisor of Hq.
        softcap: Cap on the logits, a number, or a node where dynamic shapes make it an input.
        sinks: [Hq], a logit of each head that takes mass and has no value.
    """

    index: int
    node: fx.Node
    module_path: str
    nested: bool
    query: fx.Node
    key: fx.Node
    value: fx.Node
    attn_mask: fx.Node | None
    dropout_p: float | fx.Node
    is_causal: bool
    scale: float | fx.Node | None
    enable_gqa: bool
    softcap: float | fx.Node | None = None
    sinks: fx.Node | None = None

    @property
    def is_plain(self) -> bool:
        """Whether SDPA itself could say it: no soft cap, no sinks."""
        return self.softcap is None and self.sinks is None


def find_sdpa_sites(gm: fx.GraphModule) -> Iterator[SdpaSite]:
    """The SDPA calls of gm in execution order, those of nested graphs after them.

    A site is bound when its turn comes, so that it sees what the rewrite of an earlier one put in.
    """
    for index, (graph_of, node) in enumerate(list(_sdpa_nodes(gm))):
        yield SdpaSite(index, node, module_path(node), graph_of is not gm, **_bind(node))


def module_path(node: fx.Node) -> str:
    """Path of the innermost module around node: "model.layers.0.self_attn"."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    name = str(list(stack.values())[-1][0])
    # Dynamo writes the source of the root first: L['self'], L['args'][0], L['fn'].__self__ ...
    name = re.sub(r"^L\[[^\]]*\](\[\d+\])?(\.__self__)?", "", name)
    # a forward that was set on the module itself is a step of its own in the source
    name = re.sub(r"\._(?:modules|orig_mod)\b|\.(?:_old_)?forward\.__self__\b", "", name)
    name = re.sub(r"\[['\"]?([^\]'\"]+)['\"]?\]", r".\1", name)
    return name.strip(".")


def _sdpa_nodes(gm: fx.GraphModule) -> Iterator[tuple[fx.GraphModule, fx.Node]]:
    nested: list[fx.GraphModule] = []
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target in (*SDPA_TARGETS, OWN_TARGET):
            yield gm, node
        elif node.op == "get_attr":
            child = gm
            for part in str(node.target).split("."):
                child = getattr(child, part, None)  # type: ignore[assignment]
            if isinstance(child, fx.GraphModule) and child not in nested:
                nested.append(child)
    for child in nested:
        yield from _sdpa_nodes(child)


def _bind(node: fx.Node) -> dict[str, Any]:
    own = node.target == OWN_TARGET
    bound = (_OWN_SIGNATURE if own else _SIGNATURE).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    implied = {"dropout_p": 0.0, "enable_gqa": True} if own else {}
    return {**bound.arguments, **implied}


def _sdpa(
    query: fx.Node,
    key: fx.Node,
    value: fx.Node,
    attn_mask: fx.Node | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> None:
    """The signature of F.scaled_dot_product_attention (a builtin, so inspect cannot read it)."""


_SIGNATURE = inspect.signature(_sdpa)
_OWN_SIGNATURE = inspect.signature(huggingface_op.attention)
