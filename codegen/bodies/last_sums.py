"""What hides the sum of gradients that a step starts last, for the comment where the step waits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import fx

from partc.codegen.calls.hidden import hidden_by
from partc.codegen.repeats.equal import ends_step
from partc.codegen.repeats.runs import Loop
from partc.graph import collectives

if TYPE_CHECKING:
    from partc.codegen.bodies.step import StepBody


def last_hidden(body: StepBody) -> str:
    """``the last sum: hidden behind d_embed (3 kB beside 1 MFLOP)``, or ``the last sum: exposed``;
    "" if the step waits for no sum at its end.
    """
    start, place = None, 0
    for i, item in enumerate(body.items):
        for node in item.groups[-1].nodes if isinstance(item, Loop) else [item]:
            if _is_last(body, node):
                start, place = node, i
    if start is None:
        return ""
    said = hidden_by(start, [*_behind(body, start, place)], body.spoken)
    return "the last sum: exposed" if said.startswith("exposed:") else f"the last sum: {said}"


def _is_last(body: StepBody, node: fx.Node) -> bool:
    """Whether the end of the step waits for a transfer."""
    if node.target not in collectives.COLLECTIVES:
        return False
    return any(ends_step(body.graph, user) for user in node.users)


def _behind(body: StepBody, start: fx.Node, place: int) -> Iterator[fx.Node]:
    """The calls behind a start whose lines stand behind it, in its block and in the step."""
    items = body.items[place:]
    if isinstance(items[0], Loop):
        nodes = items[0].groups[-1].nodes
        yield from nodes[nodes.index(start) + 1 :]
    yield from (item for item in items[1:] if isinstance(item, fx.Node))
