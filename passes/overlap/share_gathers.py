"""Gather an FSDP parameter outside of blocks once for forward and backward where both meet.

Between the last block's forward and its backward stand the head and the loss: the backward needs
the head's weight at once, so that the forward's gathered copy is kept for it.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from partc.graph import Graph, first_operand, innermost_block
from partc.graph.moves import gathers_param


def share_gathers(graph: Graph) -> Graph:
    """Merge all-gathers of one parameter between which no block runs, in place."""
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
    """Per call the number of blocks begun before it; forward and backward of a block count apart.

    Calls outside of blocks with the same number have no block between them.
    """
    found: dict[fx.Node, int] = {}
    number, last = 0, ""
    for node in graph.calls():
        block = innermost_block(node)
        number += block not in ("", last)
        last = block
        found[node] = number
    return found
