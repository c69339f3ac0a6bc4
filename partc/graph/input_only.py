"""What follows from the step's inputs alone, and so is known before any microbatch runs."""

from __future__ import annotations

from torch import fx

from partc.graph import Graph, draw_of, value


def input_only(graph: Graph) -> set[fx.Node]:
    """What follows from the step's inputs alone (masks, positions, labels, counts of tokens)."""
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
