"""The predicted step of a saved pipeline as a text grid, as numbers, a picture and a trace."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from partc.amounts import amount, time_text
from partc.cost.pipeline_step import Step
from partc.plan import Plan
from partc.program import Program
from partc.reports.explanation import columns
from partc.reports.pipeline_cost import PipelineCost
from partc.schedules import Schedule
from partc.schedules.csv_form import read_csv
from partc.schedules.picture import grid, svg
from partc.schedules.step_trace import chrome_trace
from partc.schedules.timing import Costs, Timeline, timeline


@dataclass(frozen=True)
class SavedStep:
    """A simulated step of a pipeline, and the costs that the simulation takes."""

    cost: PipelineCost
    step: Step

    @property
    def bubble(self) -> float:
        """The mean over all ranks of the share of their time in which they do not compute."""
        bubbles = self.step.simulated.bubbles
        return sum(bubbles) / len(bubbles)

    def timeline(self) -> Timeline:
        """The time of each action in microseconds, and the memory held in megabytes."""
        costs = self.step.simulated.costs
        us = {name: _scaled(getattr(costs, name), 1e6)
              for name in ("forward", "input_grad", "weight_grad", "transfer")}  # fmt: skip
        mb = {name: _scaled(getattr(costs, name), 1e-6) for name in ("activation", "waiting")}
        return timeline(self.step.schedule, Costs(**us, **mb))

    def svg(self) -> str:
        return svg(self.timeline())

    def trace(self) -> str:
        return chrome_trace(self.step.simulated)

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int = 0) -> str:
        """The schedule's grid, in microseconds and megabytes, then one row per rank.

        ``width``: the columns that the grid may take; 0 for 64 slots of time.
        """
        ran = self.step.simulated
        step = time_text(ran.makespan)
        rows: list[tuple[str, ...]] = [("rank", "bubble", "exposed", "in flight", "peak")]
        for rank, known in enumerate(self.cost.ranks):
            exposed = time_text(float(f"{ran.exposed[rank]:.4g}"))
            held = (amount(round(size), "B") for size in (ran.peaks[rank], known.peak_bytes))
            rows.append((str(rank), f"{ran.bubbles[rank]:.1%}", exposed, *held))
        return "\n".join([
            grid(self.timeline(), width=width),
            "(in microseconds and megabytes; without what closes the step)", "",
            f"step {step}, bubble {self.bubble:.1%}, {self.cost.device}",
            *columns(rows, right=range(5)),
        ])  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        """The step as plain data, in seconds and bytes; lists are by rank."""
        ran = self.step.simulated
        return {
            "schedule": self.step.schedule.name,
            "microbatches": self.step.schedule.microbatches,
            "step_s": ran.makespan,
            "bubble": self.bubble,
            "bubbles": ran.bubbles,
            "exposed_s": ran.exposed,
            "in_flight_bytes": ran.peaks,
            "peak_bytes": [rank.peak_bytes for rank in self.cost.ranks],
            "device": self.cost.device,
        }


def saved_step(program: Program) -> SavedStep:
    """Simulate the schedule of a saved pipeline with the costs of the compile."""
    cost = PipelineCost.of_json(program.cost.as_json())
    return SavedStep(cost, cost.plan_step(saved_schedule(program), Plan.parse(program.plan).sends))


def saved_schedule(program: Program) -> Schedule:
    """The schedule of a saved pipeline, named as in the plan."""
    return replace(read_csv(program.schedule), name=Plan.parse(program.plan).schedule)


def _scaled(row: tuple[float, ...], factor: float) -> tuple[float, ...]:
    return tuple(factor * each for each in row)
