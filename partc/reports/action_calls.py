"""The calls and transfers inside of a pipeline rank's actions, each with its line.

A stage's saved events are walked phase by phase, as for the prediction of its actions. Where an
action begins, the calls of its phases stand one behind the other; an action that is shorter than
its calls together, as ranks that share processors are, has them closer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from partc.cost.roofline import BLOCKS, Box, Clock
from partc.cost.step_events import StepEvents
from partc.cost.step_walk import walk_phases
from partc.dryrun.program_trace import TURN, TURNED, Done, ProgramTrace
from partc.plan.mesh import Mesh
from partc.reports.linked import Bar, LinkedStep, linked_step
from partc.reports.step_streams import Wait, WaitClock

PHASES_OF = {"F": ("F",), "I": ("B",), "B": ("B", "W"), "W": ("W",)}  # by an action's kind
MOST_BARS = 40_000  # of a page of less than 1 MB, which a browser draws at once
Turn = tuple[int, str, int]  # which of the rank's stages, method, microbatch


@dataclass(frozen=True)
class Inside:
    """What one kind of action of a stage does: its bars from 0 on, and how long they take."""

    step: LinkedStep
    seconds: float

    def at(self, begin: float, end: float) -> Iterator[Bar]:
        """The bars of an action that takes from ``begin`` to ``end``."""
        shrunk = min(1.0, (end - begin) / self.seconds) if self.seconds else 1.0
        for bar in self.step.bars:
            box = bar.box
            moved = replace_times(box, begin + shrunk * box.begin_s, shrunk * box.seconds)
            yield Bar(moved, bar.line, shrunk * bar.waits_s)


def replace_times(box: Box, begin_s: float, seconds: float) -> Box:
    """The box at another time."""
    return box._replace(begin_s=begin_s, seconds=seconds)


def insides(
    tape: StepEvents, mesh: Mesh, turns: Mapping[tuple[str, int], Sequence[Done]],
    trace: ProgramTrace, method_of: Mapping[str, str],
) -> dict[str, Inside]:  # fmt: skip
    """What each kind of action of a stage does.

    ``turns``: by method and microbatch what the program does in it. ``mesh``: that of the stage,
    with its machines. ``method_of``: the method that runs an action of a kind.
    """
    clocks: dict[str, WaitClock] = {}

    def clock_of(phase: str) -> Clock:
        clocks[phase] = WaitClock(mesh)
        clocks[phase].boxes = []
        return clocks[phase]

    walk_phases(tape, mesh, clock_of)
    found = {}
    for kind, phases in PHASES_OF.items():
        boxes, waits, seconds = _joined([clocks[each] for each in phases if each in clocks])
        first = min((n for method, n in turns if method == method_of[kind]), default=None)
        if boxes and first is not None:
            done = tuple(turns[method_of[kind], first])
            linked = linked_step(boxes, waits, replace(trace, done=done))
            found[kind] = Inside(linked, seconds)
    return found


def _joined(clocks: Sequence[WaitClock]) -> tuple[list[Box], list[Wait], float]:
    """The boxes and waits of phases that run one behind the other, and how long all take."""
    boxes: list[Box] = []
    waits: list[Wait] = []
    now = 0.0
    for clock in clocks:
        own = [box for box in clock.boxes or [] if box.stream != BLOCKS]
        boxes += [replace_times(box, now + box.begin_s, box.seconds) for box in own]
        waits += [Wait(now + x.begin_s, now + x.end_s, x.axis) for x in clock.waits]
        now += clock.now
    return boxes, waits, now


def turns_of(trace: ProgramTrace) -> dict[int, dict[tuple[str, int], list[Done]]]:
    """What a rank does in each method of each of its stages, by method and microbatch."""
    found: dict[int, dict[tuple[str, int], list[Done]]] = {}
    now: list[Done] | None = None
    for each in trace.done:
        if each.kind == TURN:
            now = found.setdefault(int(each.axis), {}).setdefault((each.name, each.number), [])
        elif each.kind == TURNED:
            now = None
        elif now is not None:
            now.append(each)
    return found
