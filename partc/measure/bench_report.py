"""The result of ``partc bench`` beside the prediction: a table, numbers, a trace of both."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median, quantiles
from typing import Any

from partc.amounts import counted
from partc.cost.pipeline_prediction import BUBBLE
from partc.cost.prediction import Prediction
from partc.cost.roofline import BLOCKS
from partc.machines.topology_text import shipped
from partc.machines.what_if import Change
from partc.measure.bench_rank import RankTimes
from partc.measure.timed_step import StepTimes
from partc.program import Program
from partc.reports.simulate_saved import simulate_saved
from partc.reports.stage_trace import US_PER_S, Event, trace_events, trace_text

_BLOCK = re.compile(r"partc::(forward|backward|weights)::(.*)")
_ACTION = re.compile(r"partc::([FBIW])::(\d+)[FBIW]\d+")
_OF_KIND = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}


@dataclass(frozen=True)
class Figure:
    """A time measured in several steps, and the predicted one, None if there is none."""

    predicted_s: float | None
    measured_s: tuple[float, ...]

    @property
    def measured(self) -> float:
        return median(self.measured_s)

    def cells(self) -> tuple[str, str, str]:
        """Texts in ms: predicted; measured median (quartiles); predicted / measured."""
        low, _, high = quantiles(self.measured_s, n=4, method="inclusive")
        measured = f"{_ms(self.measured)} ({_ms(low)}-{_ms(high)})"
        if self.predicted_s is None:
            return "-", measured, "-"
        ratio = f"{self.predicted_s / self.measured:.2f}" if self.measured > 0 else "-"
        return _ms(self.predicted_s), measured, ratio

    def as_json(self) -> dict[str, Any]:
        return {"predicted_s": self.predicted_s, "measured_s": list(self.measured_s)}


@dataclass(frozen=True)
class Bench:
    """The measured times of all ranks of a program.

    A step takes as long as on the slowest rank. Its parts (computing, waiting) are those of the
    rank that computes most, as in predictions.
    """

    program: Program
    ranks: tuple[RankTimes, ...]

    @cached_property
    def prediction(self) -> Prediction:
        return Prediction.of_json(self.program.cost.as_json()["prediction"])

    @cached_property
    def busiest(self) -> RankTimes:
        """The rank that computes most."""
        return max(self.ranks, key=lambda rank: median(t.computing_s for t in rank.timed))

    def figures(self) -> dict[str, Figure]:
        """The step's time and its parts: computing, waiting and hidden by axis, the optimizer."""
        there = self.prediction
        update_s = sum(phase.seconds for phase in there.phases if phase.name == "optimizer")
        plain = [*zip(*(rank.plain_s for rank in self.ranks), strict=True)]
        found = {
            "step": Figure(there.seconds, tuple(max(map(sum, step)) for step in plain)),
            "computing": Figure(there.compute_s - update_s, self._each(lambda t: t.computing_s)),
        }
        for axis in self._axes():
            found |= self._axis(axis)
        updates = tuple(max(update for _, update in step) for step in plain)
        return found | {"optimizer": Figure(update_s, updates)}

    def _axis(self, axis: str) -> dict[str, Figure]:
        known = [each for each in self.prediction.axes if each.axis == axis]
        bubble_s = sum(phase.parts.get(BUBBLE, 0.0) for phase in self.prediction.phases)
        waiting_s = sum(each.exposed_s for each in known) + bubble_s * (axis == "pp")
        exposed = self._each(lambda times: times.exposed.get(axis, 0.0))
        found = {f"waiting for {axis}": Figure(waiting_s, exposed)}
        if any(axis in times.hidden for times in self.busiest.timed):
            hidden_s = sum(each.hidden_s for each in known)
            hidden = self._each(lambda times: times.hidden.get(axis, 0.0))
            found[f"hidden, over {axis}"] = Figure(hidden_s, hidden)
        return found

    def regions(self) -> dict[str, Figure]:
        """The time of blocks, or of pipeline stages, in a step: the mean of the ranks with them."""
        predicted: defaultdict[str, float] = defaultdict(float)
        for event in self._predicted():
            if name := _region(event["name"]):
                predicted[name] += event["dur"] / US_PER_S
        holders = [[_by_region(boxes) for boxes in rank.boxes] for rank in self.ranks]
        names = dict.fromkeys(name for rank in holders for name in rank[0])
        found = {}
        for name in names:
            mine = [[step[name] for step in rank] for rank in holders if name in rank[0]]
            means = tuple(sum(step) / len(step) for step in zip(*mine, strict=True))
            found[name] = Figure(predicted.get(name), means)
        return found

    def trace(self) -> str:
        """A Chrome trace of the prediction and of every rank's last step."""
        events = [*self._predicted(labels=True)]
        first = 1 + max((event["pid"] for event in events), default=0)
        for rank, times in enumerate(self.ranks):
            events += trace_events(times.boxes[-1], first + rank, f"rank {rank}, measured")
        return trace_text(events)

    def _predicted(self, labels: bool = False) -> Iterator[Event]:
        shown = simulate_saved(self.program, Change(), self.program.model)
        for event in json.loads(shown.file("trace", self.program.model))["traceEvents"]:
            if event["ph"] == "X":
                yield event
            elif labels and event["name"] == "process_name":
                yield event | {"args": {"name": f"{event['args']['name']}, predicted"}}
            elif labels:
                yield event

    def _axes(self) -> list[str]:
        waited = {axis for rank in self.ranks for times in rank.timed for axis in times.exposed}
        predicted = {axis.axis for axis in self.prediction.axes}
        return [axis for axis in self.program.mesh.names if axis in waited | predicted]

    def _each(self, seconds: Callable[[StepTimes], float]) -> tuple[float, ...]:
        return tuple(map(seconds, self.busiest.timed))

    def __str__(self) -> str:
        num, steps = len(self.ranks), len(self.busiest.timed)
        head = (
            f"{self.program.model} on {self.program.mesh or 'one device'}: {num} ranks, "
            f"{steps} steps; ms, medians (middle half)"
        )
        rows = [("", "predicted", "measured", "predicted / measured")]
        both = {**self.figures(), **self.regions()}
        rows += [(name, *figure.cells()) for name, figure in both.items()]
        ranks = [("rank", "computing", "waiting", "hidden")]
        ranks += [(str(rank), *_medians(times.timed)) for rank, times in enumerate(self.ranks)]
        plain = median(step for step, _ in self.busiest.plain_s)
        timed = median(times.step_s for times in self.busiest.timed)
        return "\n".join([
            head, f"predicted for {self.prediction.hardware}", *self._of_other_machine(), "",
            *_columns(rows), "",
            *_columns(ranks), "", f"timers cost {timed / plain - 1:+.1%} of a step",
        ])  # fmt: skip

    def _of_other_machine(self) -> list[str]:
        """What to know of a prediction for a machine that comes with partc."""
        if self.prediction.hardware.partition(":")[0] not in shipped():
            return []
        return [
            "its figures come with partc and were not measured here: `partc calibrate` measures "
            f"this machine ({counted(os.cpu_count() or 1, 'core')} for "
            f"{counted(len(self.ranks), 'rank')}); compile for what it writes"
        ]

    def as_json(self) -> dict[str, Any]:
        """The figures as plain data, in seconds, for all steps."""
        return {
            "model": self.program.model,
            "mesh": dict(self.program.mesh.axes),
            "hardware": self.prediction.hardware,
            "figures": {name: each.as_json() for name, each in self.figures().items()},
            "regions": {name: each.as_json() for name, each in self.regions().items()},
            "ranks": [_rank_json(rank) for rank in self.ranks],
        }


def _region(title: str) -> str:
    """A table's name for the box of a block or an action; "" for other boxes.

    ``partc::forward::layers.3 -> forward of layers``, ``partc::I::2I5 -> backward of stage 2``.
    """
    if match := _BLOCK.fullmatch(title):
        return f"{match[1]} of {match[2].rpartition('.')[0] or match[2]}"
    if match := _ACTION.fullmatch(title):
        return f"{_OF_KIND[match[1]]} of stage {match[2]}"
    return ""


def _by_region(boxes: Sequence[Any]) -> dict[str, float]:
    found: defaultdict[str, float] = defaultdict(float)
    for box in boxes:
        if box.stream == BLOCKS and (name := _region(box.title)):
            found[name] += box.seconds
    return dict(found)


def _medians(timed: Sequence[StepTimes]) -> tuple[str, str, str]:
    return (
        _ms(median(times.computing_s for times in timed)),
        _ms(median(sum(times.exposed.values()) for times in timed)),
        _ms(median(sum(times.hidden.values()) for times in timed)),
    )


def _rank_json(rank: RankTimes) -> dict[str, Any]:
    return {
        "step_s": [step for step, _ in rank.plain_s],
        "optimizer_s": [update for _, update in rank.plain_s],
        "timed": [vars(times) | {"computing_s": times.computing_s} for times in rank.timed],
    }


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g}" if seconds else "0"


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as aligned lines: the first column left-aligned, the others right-aligned."""
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(others, wide[1:], strict=True)]
        lines.append("  ".join([f"  {first:<{wide[0]}}", *cells]).rstrip())
    return lines
