"""Choose the schedule of a pipeline, and the stages that make the slowest rank fastest, unless the
plan names them.
"""

from __future__ import annotations

from partc.cost.memory_limit import memory_limits
from partc.cost.pipeline_step import in_flight
from partc.errors import PlanError
from partc.graph import Graph
from partc.passes.stages.cut_virtual_stages import balance_ranks
from partc.passes.stages.stage_units import stage_units
from partc.plan import Plan
from partc.plan.mesh import PP, Mesh
from partc.schedules import NAMES, Schedule, make
from partc.schedules.actions import check_schedule
from partc.schedules.csv_form import CSV, read_csv, write_csv
from partc.schedules.named import is_of_partc
from partc.schedules.timing import Costs, timeline

AUTO = "auto"  # the schedule is made for the stages' costs


def is_pipeline(plan: Plan, mesh: Mesh) -> bool:
    """Whether a step is compiled as a pipeline: it has stages, microbatches or pipeline ranks.

    A pipeline may have one stage, or one microbatch.
    """
    return bool(plan.stages or plan.order) or plan.microbatches > 1 or mesh.pipeline_ranks > 1


def choose_schedule(graph: Graph, plan: Plan) -> Plan:
    """The plan with ``schedule`` set (1f1b, or forward-only for inference) if it is a pipeline's.

    A plan that names a schedule stays as it is.
    """
    assert plan.mesh is not None
    if plan.schedule or not is_pipeline(plan, plan.mesh):
        return plan
    return plan.changed(schedule="forward-only" if graph.loss is None else "1f1b")


def choose_stages(graph: Graph, plan: Plan, mesh: Mesh) -> Plan:
    """The plan with ``stages`` set for an unsharded graph; a plan that names them stays as it is.

    ``mesh`` has the machines under it. PlanError if the model has too few units, or if no cut fits
    ``plan.memory_bytes``.
    """
    if plan.stages or not is_pipeline(plan, mesh):
        return plan
    num = plan.virtual_stages or _usual_num(plan.schedule)
    like = named_schedule(plan if plan.order else plan.changed(virtual_stages=num))
    if like.stages == 1:
        return plan
    there = stage_units(graph, plan, mesh, stages=like.stages)
    points = balance_ranks(
        there[0], like.rank_of, in_flight=in_flight(like), there=there,
        memory_bytes=memory_limits(mesh, plan.memory_bytes),
    )  # fmt: skip
    return plan.changed(stages=tuple(there[0][point].name for point in points))


def named_schedule(plan: Plan) -> Schedule:
    """The schedule that the plan names; for ``auto`` one with the same number of stages.

    PlanError if there is no such schedule, or if it does not allow the plan's number of stages.
    """
    if plan.order:
        return _own_schedule(plan)
    ranks = pipeline_ranks(plan)
    num = virtual_stages_of(plan)
    name = plan.schedule
    if name == AUTO:
        name = "1f1b" if num == 1 else "interleaved-1f1b"
    made = make(name, ranks=ranks, microbatches=plan.microbatches, chunks=num)
    check_schedule(made)
    return made


def _own_schedule(plan: Plan) -> Schedule:
    """The schedule that the plan itself lists action by action.

    PlanError if it deadlocks, or has another number of ranks, stages or microbatches than the plan.
    """
    order = read_csv(plan.order, plan.schedule)
    ranks = pipeline_ranks(plan)
    stages = len(plan.stages) + 1 if plan.stages else ranks * plan.virtual_stages or order.stages
    for what, has, wanted in (
        ("pipeline ranks", order.ranks, ranks),
        ("pipeline ranks with a stage", sum(map(bool, order.orders)), ranks),
        ("stages", order.stages, stages),
        ("microbatches", order.microbatches, plan.microbatches),
    ):
        if has != wanted:
            raise PlanError(
                where=f"schedule {plan.schedule}",
                what=f"it has {has} {what}, and the plan {wanted}",
                why="it has a row per pipeline rank, and in it each stage and microbatch",
                do=f"Write the schedule for {wanted} {what}, or change the plan."
                if plan.schedule.endswith(CSV)
                else "Delete the plan's order, so that it is made anew, or change the plan.",
            )
    timeline(order, Costs.even(order.stages))
    return order


def with_rows(plan: Plan, order: Schedule) -> Plan:
    """The plan with the rows of a schedule that does not come with partc: it replays where nobody
    has the schedule's function.
    """
    if plan.order or is_of_partc(plan.schedule):
        return plan
    return plan.changed(order=write_csv(order))


def virtual_stages_of(plan: Plan) -> int:
    """Stages on each pipeline rank, from those that the plan names or from ``virtual_stages``.

    PlanError if the named stages cannot be divided evenly among the ranks.
    """
    ranks, stages = pipeline_ranks(plan), len(plan.stages) + 1
    if plan.stages and plan.mesh is not None and PP not in plan.mesh.names:
        raise PlanError(
            where="plan, stages", what=f"the mesh {plan.mesh} has no axis {PP}",
            why="stages are dealt out to the ranks along it",
            do="Add it to the mesh, pp=2, or leave stages out.",
        )  # fmt: skip
    if not plan.stages:
        return plan.virtual_stages or 1
    if stages % ranks or plan.virtual_stages not in (0, stages // ranks):
        wanted = ranks * (plan.virtual_stages or _usual_num(plan.schedule))
        raise PlanError(
            where="plan, stages",
            what=f"{stages} stages cannot be dealt out to {ranks} pipeline ranks"
            + (f", {plan.virtual_stages} each" if plan.virtual_stages else ""),
            why=f"{len(plan.stages)} points make {stages} stages, and each rank runs the same "
            "number of them",
            do=f"Name {wanted - 1} points, or none: partc then chooses them.",
        )
    return stages // ranks


def pipeline_ranks(plan: Plan) -> int:
    """The size of the axis ``pp``, 1 without it."""
    assert plan.mesh is not None
    return plan.mesh.pipeline_ranks


def _usual_num(name: str) -> int:
    return NAMES[name].usual_chunks if name in NAMES else 1
