"""Predict a saved program's step on other machines.

With as many devices, the same program's StepEvents are walked on the changed machines. With another
number of devices the program would be another one, so the search estimates the plan there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from partc.amounts import time_text
from partc.cost.pipeline_prediction import predict_pipeline
from partc.cost.pipeline_step import Step, gradients_of, plan_step
from partc.cost.prediction import Prediction, optimizer_time, prediction
from partc.cost.roofline import Box, Clock
from partc.cost.stage_cost import StageCost, sharing_costs, stage_link, step_costs, with_send_costs
from partc.cost.step_walk import step_times, walk_phases
from partc.errors import UsageError
from partc.machines.what_if import Change
from partc.passes.search.plans.alternatives import grown
from partc.passes.search.plans.search_plans import Ranked
from partc.plan import Plan
from partc.plan.mesh import Mesh
from partc.program import Program
from partc.reports.pipeline_cost import Closing, PipelineCost
from partc.reports.saved_step import SavedStep, saved_schedule
from partc.schedules.programs import Collective
from partc.schedules.step_costs import Link


@dataclass(frozen=True)
class StageStep:
    """The predicted step of a program without pipeline stages, and the time line of its streams."""

    prediction: Prediction
    boxes: tuple[Box, ...]
    mesh: Mesh  # with the machines of the prediction


def stage_step(program: Program, change: Change, where: str) -> StageStep:
    """The predicted step of a program without pipeline stages on changed machines.

    UsageError if the program was saved without StepEvents.
    """
    saved, mesh = _saved(program, where), _mesh(program, change)
    own = Prediction.of_json(saved["prediction"])
    boxes: list[Box] = []
    clock = Clock(mesh, boxes)
    spent = step_times(program.basis.tapes[0], mesh, clock)
    (trained,) = program.basis.trained_bytes
    spent["optimizer"] = optimizer_time(trained, mesh.hardware.device, saved["optimizer"])
    clock.note("optimizer", spent["optimizer"].seconds)
    return StageStep(prediction(spent, own.work, mesh, own.device_flops), tuple(boxes), mesh)


def pipeline_step(program: Program, change: Change, where: str) -> SavedStep:
    """The predicted step of a pipeline on changed machines, with its schedule unchanged.

    UsageError if the program was saved without StepEvents.
    """
    cost = PipelineCost.of_json(_saved(program, where))
    basis, mesh = program.basis, _mesh(program, change)
    rank_of = saved_schedule(program).rank_of
    places = [mesh.at_place(rank) for rank in rank_of]
    computed = [
        replace(stage, spent=walk_phases(tape, place))
        for stage, tape, place in zip(cost.stages, basis.tapes, places, strict=True)
    ]
    stages = tuple(
        replace(stage, spent=stage.early.ending(stage.spent, place)) if stage.early else stage
        for stage, place in zip(with_send_costs(computed, mesh), places, strict=True)
    )
    link = stage_link(stages, mesh)

    def planned(stages: tuple[StageCost, ...]) -> tuple[Step, tuple[Closing, ...]]:
        closing = tuple(_closing(each, stages, cost.link, link) for each in cost.closing)
        seconds = {each.name: each.seconds for each in closing}
        members = [Collective(each.name, (), each.members) for each in closing]
        return plan_step(
            saved_schedule(program),
            step_costs(stages, seconds, link),
            members,
            Plan.parse(program.plan).sends,
        ), closing

    step, closing = planned(stages)
    if shared := sharing_costs(stages, step, mesh.hardware.sharing):
        stages, (step, closing) = shared, planned(shared)
    there = predict_pipeline(
        [stage.spent for stage in stages], step, basis.trained_bytes, cost.prediction.work, mesh,
        flops=sum(s.forward_flops + s.backward_flops + s.weight_flops for s in stages),
        optimizer=cost.optimizer,
    )  # fmt: skip
    return SavedStep(_cost(cost, stages, closing, link, step, there), step)


def estimated_step(program: Program, change: Change, where: str) -> tuple[Ranked, Ranked | None]:
    """Two estimates for another number of devices: the program's plan now, and a plan there.

    The plan there is the best one if the program's was searched, otherwise the same plan with a
    longer data-parallel axis; None if none fits in memory. UsageError if the search cannot express
    the program's plan.
    """
    taken = program.basis.taken
    if taken is None:
        raise UsageError(
            where=where,
            what="another number of devices needs another program, and nothing estimates it",
            why="the plan is none that the search knows",
            do='Compile for so many devices, or compile with plan="auto".',
        )
    there = taken.search.on(change.apply(taken.search.mesh.hardware))
    found = there.best() if taken.searched else grown(taken.candidate, there)
    return taken.search.estimate(taken.candidate), found


def compared(seconds: float, planned: float) -> str:
    """``-14.0 % against 117.7 ms as planned``."""
    return f"{100 * (seconds / planned - 1):+.1f} % against {time_text(planned)} as planned"


def _mesh(program: Program, change: Change) -> Mesh:
    return Mesh(program.mesh.axes, change.apply(program.basis.topology()))


def _saved(program: Program, where: str) -> dict[str, Any]:
    saved = program.cost.as_json()
    if not saved or not program.basis.tapes:
        raise UsageError(
            where=where,
            what="nothing of this program's step was saved",
            why="it was not made by partc.compile",
            do="Compile the model again.",
        )
    return dict(saved)


def _closing(each: Closing, stages: tuple[StageCost, ...], before: Link, link: Link) -> Closing:
    """A closing collective with its seconds on another link.

    A stage's own gradient reductions are predicted anew. For messages between stages the number of
    bytes follows from their seconds on the link ``before``.
    """
    own = {gradients_of(number): stage.closing_s for number, stage in enumerate(stages)}
    if each.name in own:
        return replace(each, seconds=own[each.name])
    num = 1 if each.name == "loss" else len(each.members) - 1
    num_bytes = (each.seconds / num - before.latency_s) * before.bytes_per_s
    return replace(each, seconds=num * link.seconds(max(0.0, num_bytes)))


def _cost(
    cost: PipelineCost, stages: tuple[StageCost, ...], closing: tuple[Closing, ...], link: Link,
    step: Step, there: Prediction,
) -> PipelineCost:  # fmt: skip
    ran = step.simulated
    ranks = tuple(
        replace(rank, bubble=ran.bubbles[number], exposed_s=ran.exposed[number])
        for number, rank in enumerate(cost.ranks)
    )
    return replace(
        cost, stages=stages, closing=closing, link=link, ranks=ranks, step_s=ran.makespan,
        prediction=there,
    )  # fmt: skip
