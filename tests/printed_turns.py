"""Runs the printed loops of a pipeline schedule, to compare their actions with the schedule's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

from partc.codegen.text import Line
from partc.schedules.actions import Action, Kind


def done_by(lines: Sequence[Line]) -> list[Action]:
    """The actions that printed loops execute, in order: ``F(0, 3)`` is stage 0, microbatch 3."""
    done: list[Action] = []

    def does(kind: Kind) -> Callable[[int, int], None]:
        return lambda stage, i: done.append(Action(stage, kind, i))

    kinds: tuple[Kind, ...] = ("F", "B", "I", "W")
    step = SimpleNamespace(**{kind: does(kind) for kind in kinds})
    exec("\n".join(4 * line.indent * " " + line.code for line in lines), {"self": step})
    return done
