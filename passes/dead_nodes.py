"""The last pass: erase what built a mask or a repeated K, V that nobody reads any more."""

from __future__ import annotations

from torch import fx

from crisp_flex.passes.node_ops import in_place_name, op_name

# Operations that make a tensor of their own: nothing else can see it being changed.
_FRESH = frozenset(
    {"add", "sub", "mul", "floordiv", "le", "lt", "ge", "gt", "eq", "ne", "bitand", "bitor"}
    | {"and", "or", "invert", "not", "arange", "ones", "zeros", "full", "full_like", "where"}
    | {"masked_fill", "tril", "triu"}
)


def ancestors(node: fx.Node) -> set[fx.Node]:
    """node and all nodes that it is computed from."""
    found: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if current not in found:
            found.add(current)
            waiting.extend(current.all_input_nodes)
    return found


def erase_dead_ancestors(graph: fx.Graph, candidates: set[fx.Node]) -> int:
    """Erase the candidates that have no users and no effects, last ones first.

    `Graph.eliminate_dead_code` would also erase in-place cache updates, which have no users either.
    Here only calls of known pure operations go, and of in-place forms those that write to a tensor
    which nothing else reads.

    Args:
        graph: The graph to edit.
        candidates: What the caller made dead, usually `ancestors` of a replaced argument.

    Returns:
        The number of nodes erased.
    """
    erased = 0
    for node in reversed(list(graph.nodes)):
        if node in candidates and not node.users and _has_no_effect(node):
            graph.erase_node(node)
            erased += 1
    return erased


def _has_no_effect(node: fx.Node) -> bool:
    if "out" in node.kwargs:
        return False
    if in_place_name(node) is None:
        return op_name(node) is not None
    written = node.args[0] if node.args else None
    while isinstance(written, fx.Node) and set(written.users) == {node}:
        if in_place_name(written) is None:
            return op_name(written) in _FRESH and "out" not in written.kwargs
        node, written = written, written.args[0]
    return False
