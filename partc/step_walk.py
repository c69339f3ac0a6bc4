"""What a step of one stage spends its time on: its program walked with one stream that computes
and one per axis that moves data.

A program gathers a block's weights while the block before it runs, and finishes a block's
gradients behind the next one's backward (``codegen/step.py``): so does the walk. Blocks that a
folded graph leaves out are walked like the one that stands for them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise

from torch import fx

from partc import collectives
from partc.folds import list_member
from partc.graph import Graph, first_operand, is_backward, value
from partc.mesh import Mesh
from partc.moves import gathers_param
from partc.passes.storage import Replay
from partc.roofline import Clock, Spent

PHASES = ("forward", "backward", "gradients")  # the last: what is left when backwards are done


@dataclass(frozen=True)
class _Segment:
    """Calls in a row that stand in one block, or in none; gathers of parameters apart."""

    block: str
    calls: list[fx.Node]
    gathers: list[fx.Node]

    @property
    def ends_backward(self) -> bool:
        """Whether gradients that were on their way before it are finished behind it."""
        return bool(self.block and self.calls) and is_backward(self.calls[-1])


def step_times(graph: Graph, ran: Replay, mesh: Mesh) -> dict[str, Spent]:
    """What the phases of a scheduled graph of one stage spend, by name (``PHASES``)."""
    forward, backward, gradients = spent = [Spent() for _ in PHASES]
    clock = Clock(mesh, ran)
    reduced: list[tuple[fx.Node, float]] = []  # gradients on their way, and when they arrive
    segments = [_Segment("", [], []), *_unfolded(graph), _Segment("", [], [])]
    for here, following in pairwise(segments):
        before, reduced = reduced, []
        ahead = _gathered(clock, following, backward if here.ends_backward else forward)
        for node in here.calls:
            at = backward if is_backward(node) else forward
            if _ends_step(node):
                reduced.append((node, clock.start(node, at)))
            else:
                clock.run(node, at)
        if here.ends_backward:
            _finish(clock, before, backward)
        else:
            reduced = [*before, *reduced]
        clock.ends |= ahead
    _finish(clock, reduced, gradients)
    return dict(zip(PHASES, spent, strict=True))


def _gathered(clock: Clock, segment: _Segment, spent: Spent) -> dict[fx.Node, float]:
    """Start to gather the weights of a segment; when each has arrived."""
    return {node: clock.start(node, spent) for node in segment.gathers}


def _finish(clock: Clock, reduced: list[tuple[fx.Node, float]], spent: Spent) -> None:
    for node, end in reduced:
        clock.wait(node, end, spent)


def _unfolded(graph: Graph) -> Iterator[_Segment]:
    """The segments in order, those of a block that stands for others as often as these are."""
    calls = (node for node in graph.calls() if not _finishes(node))
    for block, run in groupby(calls, key=_block):
        mine = list(run)
        gathers = [n for n in mine if n.target in collectives.COLLECTIVES and gathers_param(n)]
        rest = [n for n in mine if n not in gathers]
        for _ in range(graph.times(mine[0])):
            yield _Segment(block, rest, gathers)


def _block(node: fx.Node) -> str:
    """The member of an outermost list of modules in which a call stands, "" if in none."""
    path, index = list_member(value(node).module)
    return f"{path}.{index}" if path else ""


def _finishes(node: fx.Node) -> bool:
    """Whether a call waits for finished gradients, or picks one: ``step_times`` waits for them."""
    if node.target is operator.getitem:
        return _finishes(node.all_input_nodes[0])
    return node.target is collectives.wait and _ends_step(first_operand(node))


def _ends_step(node: fx.Node) -> bool:
    """Whether a collective finishes gradients, which nothing reads before the step's end."""
    if node.target not in collectives.COLLECTIVES or not is_backward(node):
        return False
    waits = [user for user in node.users if user.target is collectives.wait]
    picks = [u for w in waits for u in w.users if u.target is operator.getitem]
    return bool(waits) and all(u.op == "output" for n in picks or waits for u in n.users)
