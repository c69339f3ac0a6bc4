"""What is put in order once the local graph of a rank is written."""

from __future__ import annotations

from torch import fx

from partc.graph import Graph, collectives, first_operand, update, value
from partc.graph.places import innermost_turn


def drop_unused(graph: fx.Graph) -> None:
    """Erase calls that nothing reads; inputs of the step stay."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)


def settle_modules(local: Graph) -> None:
    """Move a resharded copy that several blocks read into the module of the value it is made of."""
    moves = {*collectives.COLLECTIVES, *collectives.LOCAL}
    for node in local.calls():
        if node.target in moves and value(first_operand(node)).kind == "op":
            owners = {innermost_turn(u) for u in node.users if u.op == "call_function"}
            if len(owners) > 1:
                made_by = value(first_operand(node))
                update(node, module=made_by.module, at=made_by.at, source=made_by.source)
