"""Gather a parameter once where forward and backward meet, between the last block and itself."""

from __future__ import annotations

from typing import Any

from torch import fx

from partc.graph import Graph, first_operand, innermost_block
from partc.graph.moves import gathers_param


def share_gathers(graph: Graph) -> Graph:
    """Let readers that no block stands between read one gather of their parameter, in place."""
    stretches = stretch_of(graph)
    first: dict[Any, fx.Node] = {}
    for node in list(graph.calls()):
        if gathers_param(node) and not innermost_block(node):
            key = (stretches[node], first_operand(node), *sorted(node.kwargs.items()))
            shared = first.setdefault(key, node)
            if shared is not node:
                node.replace_all_uses_with(shared)
                graph.fx.erase_node(node)
    return graph


def stretch_of(graph: Graph) -> dict[fx.Node, int]:
    """For each call the number of blocks that were begun before it, again by the backward too."""
    found: dict[fx.Node, int] = {}
    number, last = 0, ""
    for node in graph.calls():
        block = innermost_block(node)
        number += block not in ("", last)
        last = block
        found[node] = number
    return found
