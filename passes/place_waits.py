"""Start every collective as soon as its operand exists and wait for it right before its first
use.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from partc import collectives
from partc.graph import Graph, block_of, first_operand, held, set_held, set_value, value


def place_waits(graph: Graph, *, phased: bool = False) -> Graph:
    """Order the local graph in place: starts move up to their operand, waits down to the first
    reader.

    Gathers of parameters are left where they are first needed: blocks gather them one block ahead.
    Results of the step (reduced gradients) are waited for at the end. A value that a block hands
    on is waited for outside the blocks that read it, so that equal blocks stay equal. ``phased``:
    the phases run as functions of their own, so each waits for what it starts.
    """
    order = {node: i for i, node in enumerate(graph.fx.nodes)}
    for node in list(graph.calls()):
        if node.target in collectives.COLLECTIVES:
            if value(first_operand(node)).kind == "op":
                _start_early(node)
            _wait_late(graph, node, order, phased)
    graph.fx.lint()
    return graph


def _start_early(node: fx.Node) -> None:
    """Move a start to right behind what it moves."""
    producer = node.args[0]
    assert isinstance(producer, fx.Node)
    producer.append(node)


def _end_of_phase(node: fx.Node) -> fx.Node:
    """What follows the last call of a node's phase."""
    last = node
    while last.next.op == "call_function" and value(last.next).phase == value(node).phase:
        last = last.next
    return last.next


def _wait_late(graph: Graph, node: fx.Node, order: dict[fx.Node, int], phased: bool) -> None:
    readers = list(node.users)
    first = min(readers, key=lambda n: order[n])
    if phased and (first.op == "output" or value(first).phase != value(node).phase):
        first = _end_of_phase(node)
    with graph.fx.inserting_before(first):
        waited = graph.fx.call_function(collectives.wait, (node,))
    made_by = value(node)
    beside = first.op != "output" and block_of(first) == block_of(node)
    at = value(first) if beside and not phased else made_by
    set_value(waited, replace(made_by, module=at.module, phase=at.phase))
    set_held(waited, held(node))
    order[waited] = order[first]
    for reader_node in readers:
        reader_node.replace_input_with(node, waited)
