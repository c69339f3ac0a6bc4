"""Predict what each variant of a step takes on links and devices as they are now.

In: what one step of one variant was measured to take. Out: the pace of devices and links that
explains it, and with it the seconds of every variant, by the cost model (``partc/cost``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import exp, log

from partc.control.meter import Seen
from partc.cost.collective_cost import collective_seconds
from partc.cost.roofline import Box, Clock, Spent
from partc.cost.step_events import LAST, START, Move, StepEvents
from partc.cost.step_walk import step_times
from partc.plan.mesh import Mesh
from partc.program import Program

STEP = 1.05  # paces are told apart by so much, so that equal ones are computed once
SLOWEST = 1e6  # times as slow as predicted: no link is slower


@dataclass(frozen=True)
class Pace:
    """How much slower than predicted devices compute, and, by axis, links carry a byte."""

    computing: float = 1.0
    links: tuple[tuple[str, float], ...] = ()


class _Paced(Clock):
    """The clock of a rank whose devices and links have another pace than predicted."""

    def __init__(self, mesh: Mesh, pace: Pace, boxes: list[Box] | None = None) -> None:
        super().__init__(mesh, boxes)
        self.pace, self.links = pace, dict(pace.links)

    def seconds_of(self, move: Move) -> float:
        whole, fixed = super().seconds_of(move), _fixed(move, self.mesh)
        return fixed + (whole - fixed) * self.links.get(move.axis, 1.0)

    def _compute(self, name: str, bound: str, seconds: float, spent: Spent) -> None:
        super()._compute(name, bound, seconds * self.pace.computing, spent)


class Prices:
    """The seconds of each variant of a step, by its name."""

    def __init__(self, variants: Mapping[str, Program]) -> None:
        first = next(iter(variants.values()))
        machines = first.basis.topology()
        self.mesh = Mesh(first.mesh.axes, machines)
        self.tapes: dict[str, StepEvents] = {n: p.basis.tapes[0] for n, p in variants.items()}
        self._seconds = lru_cache(maxsize=1024)(self._walked)
        self._bases = {name: _Basis.of(tape, self.mesh) for name, tape in self.tapes.items()}

    def pace(self, variant: str, seen: Seen) -> Pace:
        """The pace that explains what a step of a variant took."""
        base = self._bases[variant]
        links = {
            axis: _between(base.link(axis, seconds)) for axis, seconds in seen.busy_s.items()
            if axis in base.moving_s
        }  # fmt: skip
        return Pace(_between(seen.computing_s / base.computing_s), tuple(sorted(links.items())))

    def seconds(self, pace: Pace) -> dict[str, float]:
        """What each variant takes at a pace."""
        return {name: self._seconds(name, pace) for name in self.tapes}

    def _walked(self, name: str, pace: Pace) -> float:
        spent = step_times(self.tapes[name], self.mesh, _Paced(self.mesh, pace))
        return sum(each.seconds for each in spent.values())


@dataclass(frozen=True)
class _Basis:
    """A step as it was predicted: seconds of computing; of transfers by axis, and those of them
    that do not depend on bytes.
    """

    computing_s: float
    moving_s: Mapping[str, float]
    fixed_s: Mapping[str, float]

    @classmethod
    def of(cls, tape: StepEvents, mesh: Mesh) -> _Basis:
        boxes: list[Box] = []
        spent = step_times(tape, mesh, Clock(mesh, boxes))
        computing = sum(sum(each.computing.values()) for each in spent.values())
        moving = {m.axis: 0.0 for m in tape.moves}
        fixed = dict.fromkeys(moving, 0.0)
        for _, run, _ in tape.unrolled():
            for event in (*run.gathers, *run.events):
                if event.code in (START, LAST):
                    move = tape.moves[event.number]
                    moving[move.axis] += Clock(mesh).seconds_of(move)
                    fixed[move.axis] += _fixed(move, mesh)
        return cls(computing, moving, fixed)

    def link(self, axis: str, seconds: float) -> float:
        """How many times as slow a link is as predicted, if its transfers took so long."""
        return (seconds - self.fixed_s[axis]) / (self.moving_s[axis] - self.fixed_s[axis])


def _fixed(move: Move, mesh: Mesh) -> float:
    """Seconds of a collective that do not depend on its bytes."""
    return collective_seconds(move.kind, 0, mesh, move.axis)


def _between(pace: float) -> float:
    """A pace within bounds, rounded to one of few."""
    bounded = min(max(pace, 1 / SLOWEST), SLOWEST)
    return exp(round(log(bounded) / log(STEP)) * log(STEP))
