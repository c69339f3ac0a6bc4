"""Predict the time of a step by walking its StepEvents with a ``Clock``.

The clock has one stream that computes and one stream of transfers per mesh axis. The walk starts
and awaits transfers where a program does (``codegen/bodies/step.py``): gathers of parameters where
``gather_places`` has them, and a block's gradient reduction after the backward of the next block.
Equal blocks that the graph leaves out are walked as often as they run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from partc.cost.gather_places import gather_places
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
    StepEvents,
)
from partc.cost.storage import Replay
from partc.graph import Graph, Phase
from partc.plan.mesh import Mesh

PHASES = ("forward", "backward", "gradients")  # the last: waits for reductions after the backward
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
        self.begun = 0  # how many runs have begun their gathers
        self.ahead: deque[_UnderWay] = deque()  # the gathers of following runs, by run

    def through(
        self, runs: Sequence[Execution], forward: Spent, backward: Spent, prefetch: int = 1
    ) -> list[_Reduced]:
        """Execute runs one behind the other; return what waits for gradients still under way.

        Gathers of following runs start where ``gather_places`` has them.
        """
        reduced: list[_Reduced] = []
        for ran, begun in zip(runs, gather_places(runs, self.step.calls, prefetch), strict=True):
            block, here, _ = ran
            closes = bool(block) and here.is_backward
            before, reduced = reduced, []
            self.gather(runs[: begun.first], backward if closes else forward)
            self.under_way |= self.ahead.popleft()
            self.clock.block = block
            begin_s = self.clock.now
            for place, (event, site) in enumerate(ran.events()):
                at = backward if event.phase in ("B", "W") else forward
                if place == begun.place:
                    self.gather(runs[: begun.then], at)
                if event.code == LAST:
                    reduced.append(_Reduced(event, site, self.start(event, at, site)))
                else:
                    self.run(event, at, site)
            self.gather(runs[: begun.then], backward if closes else forward)
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

    def gather(self, runs: Sequence[Execution], spent: Spent) -> None:
        """Start the gathers of those of the runs that have not begun theirs."""
        for ran in runs[self.begun :]:
            starts = ran.gathers()
            self.ahead.append({e.mark: self.start(e, spent, site) for e, site in starts})
            self.begun += 1

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
