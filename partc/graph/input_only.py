"""The values that follow from the step's inputs alone: known before any microbatch runs."""

from __future__ import annotations

from torch import fx

from partc.graph import Graph, draw_of, value


def input_only(graph: Graph) -> set[fx.Node]:
    """The nodes that depend on inputs and constant buffers alone: masks, positions, labels, counts.

    Parameters, buffers that the step updates, and random draws are excluded with their readers.
    """
    updated = {graph.buffers[name] for name in graph.outputs.buffers}
    known: set[fx.Node] = set()
    for node in graph.fx.nodes:
        placed = node.op == "placeholder" and value(node).kind != "param" and node not in updated
        drawn = node.op == "call_function" and bool(draw_of(node))
        if placed or (
            node.op == "call_function"
            and not drawn
            and all(operand in known for operand in node.all_input_nodes)
        ):
            known.add(node)
    return known
