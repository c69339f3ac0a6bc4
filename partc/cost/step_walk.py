"""Predict the time of a step by walking its StepEvents with a ``Clock``.

The clock has one stream that computes and one stream of transfers per mesh axis. The walk starts
and awaits transfers where a program does (``codegen/bodies/step.py``): a block's parameters are
gathered while the block before it runs, those of several blocks between two loops over blocks, and
a block's gradient reduction is awaited after the backward of the next block. Equal blocks that the
graph leaves out are walked as often as they run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from partc.cost.record_events import record_phases
from partc.cost.roofline import Clock, Spent
from partc.cost.sites import NOWHERE, Site
from partc.cost.step_events import (
    CALL,
    LAST,
    WAIT,
    Event,
    Execution,
    Move,
    Run,
    StepEvents,
)
from partc.cost.storage import Replay
from partc.graph import Graph, Phase
from partc.plan.mesh import Mesh

PHASES = ("forward", "backward", "gradients")  # the last: waits for reductions after the backward
_NOTHING = Execution("", Run((), (), False))
_UnderWay = dict[str, tuple[Move, float]]  # a transfer's mark -> the transfer, when it ends


def step_times(step: StepEvents, mesh: Mesh, clock: Clock | None = None) -> dict[str, Spent]:
    """The time of each phase (``PHASES``) of a step without pipeline stages.

    A ``clock`` with boxes records the time line too.
    """
    forward, backward, gradients = spent = [Spent() for _ in PHASES]
    walk = _Walk(step, clock or Clock(mesh))
    left = walk.through([*step.unrolled()], forward, backward, step.prefetch)
    walk.finish(left, gradients)
    return dict(zip(PHASES, spent, strict=True))


def step_seconds(step: StepEvents, mesh: Mesh) -> float:
    """Seconds of a step without pipeline stages, and without the optimizer."""
    return sum(spent.seconds for spent in step_times(step, mesh).values())


def walk_phases(
    step: StepEvents, mesh: Mesh, clock_of: Callable[[str], Clock] | None = None
) -> dict[Phase, Spent]:
    """The time of each phase of a pipeline stage; each phase starts with idle streams.

    ``mesh`` has all axes, ``pp`` too: which links an axis crosses depends on all axes. ``clock_of``
    makes the clock of a phase, which may record the time line too.
    """
    runs: dict[Phase, list[Execution]] = {}
    for ran in step.unrolled():
        first = next((event for event, _ in (*ran.gathers(), *ran.events())), None)
        if first is not None:
            phase: Phase = first.phase  # type: ignore[assignment]
            runs.setdefault(phase, []).append(ran)
    spent = {phase: Spent() for phase in runs}
    for phase, mine in runs.items():
        walk = _Walk(step, clock_of(phase) if clock_of else Clock(mesh))
        left = walk.through(mine, spent[phase], spent[phase])
        walk.finish(left, spent[phase])
    return spent


def phase_times(graph: Graph, ran: Replay, mesh: Mesh) -> dict[Phase, Spent]:
    """The time of each phase of a stage's scheduled graph, as ``walk_phases`` gives it."""
    return walk_phases(record_phases(graph, ran), mesh)


class _Reduced(NamedTuple):
    """A wait for gradients, with the transfer and when it ends, or an addition of what arrived."""

    event: Event
    site: Site
    moved: tuple[Move, float] | None = None


class _Walk:
    """Runs events on a clock, and keeps the transfers that are under way by their marks."""

    def __init__(self, step: StepEvents, clock: Clock) -> None:
        self.step, self.clock = step, clock
        self.under_way: _UnderWay = {}

    def through(
        self, runs: Sequence[Execution], forward: Spent, backward: Spent, prefetch: int = 1
    ) -> list[_Reduced]:
        """Execute runs one behind the other; return what waits for gradients still under way.

        Gathers of following runs are started before a run: of ``prefetch`` ones between two blocks.
        """
        reduced: list[_Reduced] = []
        ahead: deque[_UnderWay] = deque()  # the gathers of following runs, by run
        # an empty run in front, during which the first block's parameters are gathered
        for number, ran in enumerate([_NOTHING, *runs]):
            block, here, _ = ran
            closes = bool(block) and here.is_backward
            before, reduced = reduced, []
            self.under_way |= ahead.popleft() if ahead else {}
            between = not block and number > 1
            begun = number + len(ahead)
            for following in runs[begun : number + (prefetch if between else 1)]:
                at = backward if closes else forward
                ahead.append({e.mark: self.start(e, at, site) for e, site in following.gathers()})
            self.clock.block = block
            begin_s = self.clock.now
            for event, site in ran.events():
                at = backward if event.phase in ("B", "W") else forward
                if event.code == LAST:
                    reduced.append(_Reduced(event, site, self.start(event, at, site)))
                else:
                    self.run(event, at, site)
            reduced += [
                _Reduced(event, site, self.under_way.pop(event.mark, None))
                for event, site in ran.closing()
            ]
            if block:
                self.clock.note_block("backward" if closes else "forward", begin_s)
            if closes:
                self.finish(before, backward)
            else:
                reduced = [*before, *reduced]
        return reduced

    def run(self, event: Event, spent: Spent, site: Site = NOWHERE) -> None:
        """Execute a call, a start or a wait; a wait for a transfer never started does nothing."""
        self.clock.site = site
        if event.code == CALL:
            self.clock.compute(self.step.calls[event.number], spent)
        elif event.code != WAIT:
            self.under_way[event.mark] = self.start(event, spent, site)
        elif event.mark in self.under_way:
            self.clock.wait(*self.under_way.pop(event.mark), spent)

    def start(self, event: Event, spent: Spent, site: Site = NOWHERE) -> tuple[Move, float]:
        """Start a transfer on the clock; return the transfer, and when it ends."""
        self.clock.site = site
        move = self.step.moves[event.number]
        return move, self.clock.start(move, spent)

    def finish(self, reduced: Sequence[_Reduced], spent: Spent) -> None:
        """Wait for gradients in the order in which their transfers were started, and add them."""
        for event, site, moved in reduced:
            if moved is not None:
                self.clock.wait(*moved, spent)
            elif event.code == CALL:
                self.run(event, spent, site)
