"""Autocast at a site: SDPA casts its inputs itself; the sparse call gets them cast by nodes."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from crisp_flex.passes.match import OWN_TARGET, SdpaSite
from crisp_flex.passes.node_ops import tensor_of

_HALF = (torch.float16, torch.bfloat16)


def cast_inputs(
    site: SdpaSite, key: fx.Node, value: fx.Node
) -> tuple[SdpaSite, fx.Node, fx.Node, list[fx.Node]]:
    """The site with its inputs in the dtype in which SDPA computes, and the nodes inserted for it.

    Before:
        %attn = scaled_dot_product_attention(%q, %k, %v)           float32 in, bfloat16 out
    After:
        %q_1, %k_1 = %q.to(torch.bfloat16), %k.to(torch.bfloat16)  what is bfloat16 already stays
        %attn = scaled_dot_product_attention(%q, %k, %v)

    Args:
        site: The call; its own arguments stay as they are.
        key: Its key without a repetition of heads.
        value: Likewise.

    Returns:
        The site with the query to take, the key, the value, and the new nodes: none outside of
        autocast. Who does not use them erases them.
    """
    found = [tensor_of(node) for node in (site.query, key, value, site.node)]
    if site.nested or site.node.target == OWN_TARGET or any(x is None for x in found):
        return site, key, value, []
    *given, out = (x.dtype for x in found if x is not None)
    floats = all(dtype in (torch.float32, *_HALF) for dtype in given)
    if not floats or out not in _HALF or set(given) == {out}:
        return site, key, value, []
    made: list[fx.Node] = []

    def cast(node: fx.Node) -> fx.Node:
        tensor = tensor_of(node)
        if tensor is None or tensor.dtype == out:
            return node
        with site.node.graph.inserting_before(site.node):
            made.append(site.node.graph.call_method("to", (node, out)))
        known = "example_value" if "example_value" in node.meta else "val"
        made[-1].meta[known] = tensor.to(out)
        return made[-1]

    query, key, value = cast(site.query), cast(key), cast(value)
    return replace(site, query=query), key, value, made
