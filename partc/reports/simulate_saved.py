"""``partc simulate``: the predicted step of a saved program, on its machines or on others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from partc.amounts import amount, time_text
from partc.cost.prediction import Prediction
from partc.errors import UsageError
from partc.machines.what_if import Change
from partc.passes.search.plans.search_plans import Ranked
from partc.program import Program
from partc.reports.other_machines import compared, estimated_step, pipeline_step, stage_step
from partc.reports.saved_step import saved_step
from partc.reports.stage_trace import chrome_trace
from partc.reports.step_svg import step_svg


@dataclass(frozen=True)
class Shown:
    """A predicted step as text, as plain data, and as files by kind (``trace``, ``svg``).

    ``fits``: whether any plan fits the changed machines.
    """

    text: str
    told: Mapping[str, Any]
    files: Mapping[str, Callable[[], str]] = field(default_factory=dict)
    fits: bool = True

    def file(self, kind: str, where: str) -> str:
        """The content of the file of a kind; UsageError if the step has no such file."""
        if kind not in self.files:
            raise UsageError(
                where=where,
                what=f"there is no {kind} of this step",
                why="an estimate has no time line",
                do="Leave the option out.",
            )
        return self.files[kind]()


def simulate_saved(program: Program, change: Change, where: str, width: int = 0) -> Shown:
    """Predict the step of a saved program on changed machines; ``Change()`` changes nothing.

    ``width``: the columns that a pipeline's grid may take; 0 for 64 slots of time.
    """
    if change.devices:
        return _estimated(program, change, where)
    if program.schedule:
        return _pipeline(program, change, where, width)
    return _stage(program, change, where)


def _stage(program: Program, change: Change, where: str) -> Shown:
    step = stage_step(program, change, where)
    there, saved = step.prediction, program.cost.as_json()
    changed = None if change == Change() else change
    files = {
        "trace": lambda: chrome_trace(step.boxes),
        "svg": lambda: step_svg(program, where, change=changed),
    }
    if changed is None:
        return Shown(str(there), there.as_json(), files)
    return _changed(str(there), there.as_json(), change, there, saved, files)


def _pipeline(program: Program, change: Change, where: str, width: int) -> Shown:
    if change == Change():
        step = saved_step(program)
        return Shown(step.text(width), step.as_json(), {"trace": step.trace, "svg": step.svg})
    step = pipeline_step(program, change, where)
    files = {"trace": step.trace, "svg": step.svg}
    there = step.cost.prediction
    text = f"{step.text(width)}\n\n{there}"
    return _changed(text, step.as_json(), change, there, program.cost.as_json(), files)


def _changed(
    text: str, told: Mapping[str, Any], change: Change, there: Prediction, saved: Any,
    files: Mapping[str, Callable[[], str]],
) -> Shown:  # fmt: skip
    """A step on changed machines, with the change and its effect on the time."""
    planned = Prediction.of_json(saved["prediction"]).seconds
    line = f"{change}: {time_text(there.seconds)} a step, {compared(there.seconds, planned)}"
    more = {"change": str(change), "seconds": there.seconds, "planned_s": planned}
    return Shown(f"{text.rstrip()}\n{line}", {**told, **more}, files)


def _estimated(program: Program, change: Change, where: str) -> Shown:
    own, found = estimated_step(program, change, where)
    planned = own.estimate.step_s
    if found is None:
        told = {"change": str(change), "planned_s": planned, "seconds": None}
        return Shown(
            f"{change}: no plan fits there: none divides the batch, or a weight, among that many "
            "devices within their memory. Name another number, as a multiple or a part of "
            f"{program.mesh.num_ranks}.",
            told, fits=False,
        )  # fmt: skip
    return _of_estimate(change, found, planned)


def _of_estimate(change: Change, found: Ranked, planned: float) -> Shown:
    step, peak = found.estimate.step_s, found.estimate.peak_bytes
    text = (
        f"{change}: estimated {time_text(step)} a step, {compared(step, planned)}\n"
        f"by {found.candidate}, {amount(round(peak), 'B')} a rank"
    )
    told = {
        "change": str(change), "seconds": step, "planned_s": planned, "peak_bytes": peak,
        "plan": str(found.candidate),
    }  # fmt: skip
    return Shown(text, told)
