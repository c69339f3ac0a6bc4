"""What a step spends its time on: its tape walked with one stream that computes and one per axis
that moves data.

A program gathers a block's weights while the block before it runs, perhaps several blocks' while
something else runs between two loops, and finishes a block's gradients behind the next one's
backward (``codegen/bodies/step.py``): so does the walk. Blocks that a
folded graph leaves out are walked like the one that stands for them.
"""

from __future__ import annotations

from collections import deque

from partc.cost.record_events import record_phases
from partc.cost.roofline import Clock, Spent
from partc.cost.step_events import CALL, LAST, WAIT, Event, Move, Run, StepEvents
from partc.cost.storage import Replay
from partc.graph import Graph, Phase
from partc.plan.mesh import Mesh

PHASES = ("forward", "backward", "gradients")  # the last: what is left when backwards are done
_NOTHING = ("", Run((), (), False))
_UnderWay = dict[str, tuple[Move, float]]  # by mark, with when they end


def step_times(tape: StepEvents, mesh: Mesh, clock: Clock | None = None) -> dict[str, Spent]:
    """What the phases of a step of one stage spend, by name (``PHASES``)."""
    forward, backward, gradients = spent = [Spent() for _ in PHASES]
    walk = _Walk(tape, clock or Clock(mesh))
    reduced: list[tuple[Move, float]] = []  # gradients on their way, and when they arrive
    ahead: deque[_UnderWay] = deque()  # the gathers of following runs, by run
    runs = [*tape.unrolled()]
    for number, (block, here) in enumerate([_NOTHING, *runs]):
        closes = bool(block) and here.is_backward
        before, reduced = reduced, []
        walk.under_way |= ahead.popleft() if ahead else {}
        between = not block and number > 1
        begun = number + len(ahead)
        for _, following in runs[begun : number + (tape.prefetch if between else 1)]:
            at = backward if closes else forward
            ahead.append({e.mark: walk.start(e, at) for e in following.gathers})
        walk.clock.block = block
        begin_s = walk.clock.now
        for event in here.events:
            at = backward if event.phase == "B" else forward
            if event.code == LAST:
                reduced.append(walk.start(event, at))
            else:
                walk.run(event, at)
        if block:
            walk.clock.note_block("backward" if closes else "forward", begin_s)
        if closes:
            walk.finish(before, backward)
        else:
            reduced = [*before, *reduced]
    walk.finish(reduced, gradients)
    return dict(zip(PHASES, spent, strict=True))


def step_seconds(tape: StepEvents, mesh: Mesh) -> float:
    """How long a step of one stage takes, without the optimizer's."""
    return sum(spent.seconds for spent in step_times(tape, mesh).values())


def walk_phases(tape: StepEvents, mesh: Mesh) -> dict[Phase, Spent]:
    """What each phase of a stage spends, each run by itself from its first call.

    ``mesh`` has all axes, ``pp`` too: how far apart ranks stand depends on them.
    """
    walks: dict[str, _Walk] = {}
    spent: dict[Phase, Spent] = {}
    for _, run in tape.unrolled():
        for event in run.events:
            phase: Phase = event.phase  # type: ignore[assignment]
            walk = walks.setdefault(phase, _Walk(tape, Clock(mesh)))
            walk.run(event, spent.setdefault(phase, Spent()))
    return spent


def phase_times(graph: Graph, ran: Replay, mesh: Mesh) -> dict[Phase, Spent]:
    """The same of a scheduled graph."""
    return walk_phases(record_phases(graph, ran), mesh)


class _Walk:
    """A clock that runs events; transfers that are under way by their marks."""

    def __init__(self, tape: StepEvents, clock: Clock) -> None:
        self.tape, self.clock = tape, clock
        self.under_way: _UnderWay = {}

    def run(self, event: Event, spent: Spent) -> None:
        """Execute the next call, start or wait; what was never started is not waited for."""
        if event.code == CALL:
            self.clock.compute(self.tape.calls[event.number], spent)
        elif event.code != WAIT:
            self.under_way[event.mark] = self.start(event, spent)
        elif event.mark in self.under_way:
            self.clock.wait(*self.under_way.pop(event.mark), spent)

    def start(self, event: Event, spent: Spent) -> tuple[Move, float]:
        """Start a transfer; which, and when it ends."""
        move = self.tape.moves[event.number]
        return move, self.clock.start(move, spent)

    def finish(self, moves: list[tuple[Move, float]], spent: Spent) -> None:
        """Wait for transfers in the order in which they were started."""
        for move, end in moves:
            self.clock.wait(move, end, spent)
