"""The values that follow from the step's inputs alone: known before any microbatch runs."""

from __future__ import annotations

from torch import fx

from partc.graph import Graph, value
from partc.graph.draws import draws_numbers


def input_only(graph: Graph, *, draws: bool = False) -> set[fx.Node]:
    """The nodes that depend on inputs and constant buffers alone: masks, positions, labels, counts.

    Parameters and buffers that the step updates are excluded with their readers, and so are random
    draws, unless ``draws`` says otherwise. A draw can be repeated, but not cut in another way: its
    numbers follow from its place.
    """
    updated = {graph.buffers[name] for name in graph.outputs.buffers}
    known: set[fx.Node] = set()
    for node in graph.fx.nodes:
        placed = node.op == "placeholder" and value(node).kind != "param" and node not in updated
        drawn = not draws and draws_numbers(node)
        if placed or (
            node.op == "call_function"
            and not drawn
            and all(operand in known for operand in node.all_input_nodes)
        ):
            known.add(node)
    return known
