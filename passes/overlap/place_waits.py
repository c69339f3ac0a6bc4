"""Start each collective as soon as its operand exists, and wait right before its first reader."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from partc.graph import (
    Graph,
    collectives,
    fake_of,
    is_tensor,
    set_fake,
    set_value,
    tensor_args,
    value,
)
from partc.graph.places import innermost_turn


def place_waits(graph: Graph, *, phased: bool = False) -> Graph:
    """Move starts up to their operands and insert waits before the first readers, in place.

    All-gathers of parameters stay at their first reader, as the printed loop gathers each block's
    weights one block ahead. Reduced gradients are waited for at the step's end. A wait for another
    block's value belongs to no reading block, so that equal blocks stay equal. ``phased``: forward
    and backward run as separate functions, so each waits for the collectives that it starts.
    """
    for node in list(graph.calls()):
        if node.target in collectives.COLLECTIVES:
            # A parameter exists from the start: its gathers would all start at once, and fill the
            # memory with whole weights.
            if value(tensor_args(node)[0]).kind == "op":
                _start_early(node)
            _wait_late(graph, node, phased)
    graph.fx.lint()
    return graph


def _start_early(node: fx.Node) -> None:
    """Move a start right behind the last of its operands; fx nodes compare by graph position."""
    max(tensor_args(node)).append(node)


def _end_of_phase(node: fx.Node) -> fx.Node:
    """The node behind the last call of the phase that ``node`` is in."""
    last = node
    while last.next.op == "call_function" and value(last.next).phase == value(node).phase:
        last = last.next
    return last.next


def _wait_late(graph: Graph, node: fx.Node, phased: bool) -> None:
    """Insert a wait before the first reader; the ``getitem`` calls of a bucket move behind it."""
    picks = [] if is_tensor(node) else list(node.users)
    readers = [user for result in picks or [node] for user in result.users]
    first = min(readers)
    if phased and (first.op == "output" or value(first).phase != value(node).phase):
        first = _end_of_phase(node)
    with graph.fx.inserting_before(first):
        waited = graph.fx.call_function(collectives.wait, (node,))
    made_by = value(node)
    # The wait takes the reader's module only inside of one block: a wait for another block's value
    # would make this block differ from its equals, which share one printed text.
    beside = first.op != "output" and innermost_turn(first) == innermost_turn(node)
    at = value(first) if beside and not phased and not picks else made_by
    set_value(waited, replace(made_by, module=at.module, at=at.at, phase=at.phase))
    set_fake(waited, fake_of(node))
    for reader in picks or readers:
        reader.replace_input_with(node, waited)
    for pick in reversed(picks):
        waited.append(pick)
