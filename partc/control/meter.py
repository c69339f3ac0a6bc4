"""Measure the steps of a stage, and agree with all ranks on the numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from partc.measure.timed_calls import Clock, CudaClock, HostClock, Transfer, TransferTimes
from partc.measure.timed_step import moved_boxes, shares
from partc.program.ranks.same_choice import SameChoice


@dataclass(frozen=True)
class Seen:
    """A step as all ranks have seen it, in seconds.

    ``step_s``: of the slowest rank. ``computing_s``: what a rank does not wait, on the rank that
    waits least. ``busy_s``: by axis, how long transfers ran, on the rank that came last to them,
    as the others' also count the time that they waited for it. ``exposed_s``: by axis, the least
    time that a rank waited.
    """

    step_s: float
    computing_s: float
    busy_s: Mapping[str, float]
    exposed_s: Mapping[str, float]

    def as_json(self) -> dict[str, Any]:
        return {
            "step_s": self.step_s, "computing_s": self.computing_s,
            "busy_s": dict(self.busy_s), "exposed_s": dict(self.exposed_s),
        }  # fmt: skip


class Meter:
    """Times the transfers of a stage's steps. ``axes``: a process group's name -> its axis."""

    def __init__(self, axes: Mapping[str, str], device: str, ranks: SameChoice) -> None:
        self.axes, self.ranks = axes, ranks
        self.clock: Clock = CudaClock() if device == "cuda" else HostClock()
        self._measured: list[float] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one step; ``seen`` then has its numbers."""
        clock, transfers = self.clock, list[Transfer]()
        with TransferTimes(clock, self.axes, transfers).on():
            first = clock.now()
            yield
            last = clock.now()
        boxes = moved_boxes(transfers, lambda moment: clock.seconds(first, moment))
        exposed, hidden = shares(boxes)
        seconds = clock.seconds(first, last)
        names = dict.fromkeys(self.axes.values())
        waited = [exposed.get(axis, 0.0) for axis in names]
        ran = [hidden.get(axis, 0.0) + each for axis, each in zip(names, waited, strict=True)]
        least = [-each for each in (*waited, *ran)]  # of all ranks the largest is agreed on
        self._measured = [seconds, seconds - sum(waited), *least]

    def seen(self) -> Seen:
        """The last step, with the numbers of all ranks, which call this together."""
        step_s, computing_s, *least = self.ranks.largest(self._measured)
        names = [*dict.fromkeys(self.axes.values())]
        exposed, busy = least[: len(names)], least[len(names) :]
        return Seen(
            step_s, computing_s,
            {axis: -each for axis, each in zip(names, busy, strict=True)},
            {axis: -each for axis, each in zip(names, exposed, strict=True)},
        )  # fmt: skip
