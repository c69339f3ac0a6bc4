"""Start every collective as soon as its operand exists and wait for it right before its first
use.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from partc.graph import (
    Graph,
    collectives,
    fake_of,
    innermost_block,
    is_tensor,
    set_fake,
    set_value,
    tensor_args,
    value,
)


def place_waits(graph: Graph, *, phased: bool = False) -> Graph:
    """Order the local graph in place: starts move up to their operand, waits down to the first
    reader.

    Gathers of parameters are left where they are first needed: blocks gather them one block ahead.
    Results of the step (reduced gradients) are waited for at the end. A value that a block hands
    on is waited for outside the blocks that read it, so that equal blocks stay equal. ``phased``:
    the phases run as functions of their own, so each waits for what it starts.
    """
    for node in list(graph.calls()):
        if node.target in collectives.COLLECTIVES:
            if value(tensor_args(node)[0]).kind == "op":
                _start_early(node)
            _wait_late(graph, node, phased)
    graph.fx.lint()
    return graph


def _start_early(node: fx.Node) -> None:
    """Move a start to right behind the last of what it moves; nodes compare by their place."""
    max(tensor_args(node)).append(node)


def _end_of_phase(node: fx.Node) -> fx.Node:
    """What follows the last call of a node's phase."""
    last = node
    while last.next.op == "call_function" and value(last.next).phase == value(node).phase:
        last = last.next
    return last.next


def _wait_late(graph: Graph, node: fx.Node, phased: bool) -> None:
    """Wait right before the first reader; the results of a joined transfer are picked there."""
    picks = [] if is_tensor(node) else list(node.users)
    readers = [user for result in picks or [node] for user in result.users]
    first = min(readers)
    if phased and (first.op == "output" or value(first).phase != value(node).phase):
        first = _end_of_phase(node)
    with graph.fx.inserting_before(first):
        waited = graph.fx.call_function(collectives.wait, (node,))
    made_by = value(node)
    beside = first.op != "output" and innermost_block(first) == innermost_block(node)
    at = value(first) if beside and not phased and not picks else made_by
    set_value(waited, replace(made_by, module=at.module, phase=at.phase))
    set_fake(waited, fake_of(node))
    for reader in picks or readers:
        reader.replace_input_with(node, waited)
    for pick in reversed(picks):
        waited.append(pick)
