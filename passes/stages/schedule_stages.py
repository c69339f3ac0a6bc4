"""The local graph of all stages in; stage graphs, their costs and the planned step out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from partc.cost.memory import state_bytes
from partc.cost.memory_limit import memory_limits
from partc.cost.pipeline_step import Step, closing_collectives, closing_seconds, plan_step
from partc.cost.stage_cost import (
    StageCost,
    sharing_costs,
    stage_cost,
    stage_link,
    step_costs,
    with_messages,
)
from partc.errors import PlanError
from partc.graph import Graph
from partc.graph.folds import likes_of
from partc.graph.graph_edits import copied
from partc.graph.tied import Tied, tied_parameters
from partc.passes.overlap.fill_waits import fill_waits
from partc.passes.overlap.join_collectives import join_collectives
from partc.passes.overlap.order_step import (
    GAIN,
    PIECES,
    call_seconds,
    fastest,
    most_gained,
    start_seconds,
)
from partc.passes.overlap.place_waits import place_waits
from partc.passes.overlap.sum_in_levels import sum_in_levels
from partc.passes.overlap.take_turns import awaited_in_blocks, take_turns
from partc.passes.stages.choose_stages import AUTO, chunks_of, named_schedule, pipeline_ranks
from partc.passes.stages.early_sums import with_early_sums
from partc.passes.stages.repeat_stages import repeat_stages
from partc.passes.stages.split_stages import split_stages
from partc.plan import Plan
from partc.plan.mesh import Mesh
from partc.schedules import Schedule
from partc.schedules.auto import auto

TURNS = ("F", "B", "W")  # the phases of each microbatch


@dataclass(frozen=True)
class Stages:
    """What is known of all stages before any program is printed."""

    graphs: list[Graph]
    tied: list[Tied]
    costs: tuple[StageCost, ...]
    step: Step
    pieces: int = 1  # in how many blocks are computed that wait for activations


def stage_ways(local: Graph, plan: Plan) -> Iterator[Stages]:
    """The stages as the step is fastest, and where their blocks are in pieces that nobody asked
    for, as they are without, should that need less memory.
    """
    whole = schedule_stages(local, plan)
    if plan.pieces or not _may_gain(local, plan, whole):
        yield replace(whole, pieces=max(plan.pieces, 1))
        return
    ways = {1: whole}

    def seconds(num: int) -> float:
        ways[num] = ways.get(num) or schedule_stages(local, plan.changed(pieces=num))
        return ways[num].step.simulated.makespan

    best = fastest(seconds)
    yield replace(ways[best], pieces=best)
    if best > 1:
        yield whole


def _may_gain(local: Graph, plan: Plan, whole: Stages) -> bool:
    """Whether to try blocks in pieces in all stages: not where too little time is left to save, or
    too little is saved in the stage that most are like.
    """
    if _most_gained(whole, _mesh(plan)) <= GAIN:
        return False
    likes = likes_of(local.kept, len(whole.graphs))
    (like, num), *_ = Counter(likes).most_common(1)
    if num == 1:
        return True
    stage = split_stages(local, plan, split_backward="W" in whole.step.schedule.kinds)[like]
    before, after = (
        stage_cost(graph, _mesh(plan))
        for graph in (whole.graphs[likes.index(like)], _ordered(take_turns(stage, PIECES[0]), plan))
    )
    return _turn_seconds(after) < (1 - GAIN) * _turn_seconds(before)


def _turn_seconds(cost: StageCost) -> float:
    return cost.forward_s + cost.backward_s + cost.weight_s


def _most_gained(stages: Stages, mesh: Mesh) -> float:
    """The share of what all stages spend on a microbatch that blocks in pieces could save."""
    more_s: Counter[str] = Counter()
    for graph in stages.graphs:
        more_s.update(start_seconds(graph, awaited_in_blocks(graph), mesh))
    spent = [s for cost in stages.costs for phase, s in cost.spent.items() if phase in TURNS]
    return most_gained(spent, more_s) if more_s else 0.0


def schedule_stages(local: Graph, plan: Plan) -> Stages:
    """Cut the graph at the plan's stages and prove that the plan's schedule of them finishes."""
    order = named_schedule(plan)
    if plan.schedule == AUTO:
        return _auto(local, plan)
    _check_kinds(local, order)
    graphs = stage_graphs(local, plan, "W" in order.kinds)
    return planned(graphs, _costs(graphs, local, plan, order.rank_of), order, _mesh(plan))


def stage_graphs(local: Graph, plan: Plan, split_backward: bool) -> list[Graph]:
    """The scheduled graph of each stage."""
    whole = take_turns(copied(local), plan.pieces) if plan.pieces > 1 else local
    stages = split_stages(whole, plan, split_backward=split_backward)
    return repeat_stages([_ordered(stage, plan) for stage in stages], local)


def _ordered(stage: Graph, plan: Plan) -> Graph:
    """Its transfers joined, and started and waited for."""
    sum_in_levels(stage, _mesh(plan))
    joined = join_collectives(stage, plan.join_mb, _mesh(plan))
    waiting = place_waits(joined, phased=True)
    return fill_waits(waiting, call_seconds(waiting, _mesh(plan)))


def _costs(
    graphs: Sequence[Graph], local: Graph, plan: Plan, rank_of: Sequence[int]
) -> tuple[StageCost, ...]:
    """The costs of every stage on its own devices; those that are alike compute the same there."""
    meshes = [_mesh(plan).at_place(rank) for rank in rank_of]
    alike = list(zip(likes_of(local.kept, len(graphs)), (m.hardware for m in meshes), strict=True))
    compiled = dict(zip(alike, zip(graphs, meshes, strict=True), strict=True))
    costs = {key: stage_cost(*each) for key, each in compiled.items()}
    return with_messages([costs[key] for key in alike], _mesh(plan))


def planned(
    graphs: list[Graph], costs: tuple[StageCost, ...], order: Schedule, mesh: Mesh
) -> Stages:
    """Lower and simulate a schedule of stages with these costs."""
    tied = [one.name for one in tied_parameters(graphs)]
    costs = with_early_sums(graphs, costs, order, mesh, tied)
    stages = _planned(graphs, costs, order, mesh)
    shared = sharing_costs(costs, stages.step, mesh.hardware.sharing)
    return stages if shared is None else _planned(graphs, shared, order, mesh)


def _planned(
    graphs: list[Graph], costs: tuple[StageCost, ...], order: Schedule, mesh: Mesh
) -> Stages:
    ends = [cost.closing_s for cost in costs]
    link = stage_link(costs, mesh)
    tied = tied_parameters(graphs)
    closing_s = closing_seconds(graphs, tied, order, ends, link)
    closing = closing_collectives(graphs, tied, order)
    step = plan_step(order, step_costs(costs, closing_s, link), closing)
    return Stages(graphs, tied, costs, step)


def _auto(local: Graph, plan: Plan) -> Stages:
    """The best order for what the stages cost; whether split backwards pay is its choice."""
    graphs = stage_graphs(local, plan, True)
    mesh = _mesh(plan)
    rank_of = named_schedule(plan).rank_of
    costs = _costs(graphs, local, plan, rank_of)
    ranks = pipeline_ranks(plan)
    order = auto(
        step_costs(costs, {}, stage_link(costs, mesh)), ranks=ranks, microbatches=plan.microbatches,
        memory_cap=_left_for_activations(graphs, plan),
    )  # fmt: skip
    if "W" in order.kinds:
        return planned(graphs, costs, order, mesh)
    graphs = stage_graphs(local, plan, False)
    return planned(graphs, _costs(graphs, local, plan, rank_of), order, mesh)


def _mesh(plan: Plan) -> Mesh:
    """The mesh of a complete plan, with the hardware under it."""
    assert plan.mesh is not None
    return plan.mesh


def _left_for_activations(graphs: Sequence[Graph], plan: Plan) -> float | None:
    """What the memory of a rank leaves beside parameters, gradients, optimizer and inputs, taking
    the ranks as alike."""
    limits = memory_limits(_mesh(plan), plan.memory_bytes)
    if limits is None:
        return None
    limit = min(limits)
    states = [state_bytes(graph) for graph in graphs]
    each = sorted((s.params + s.grads + s.optimizer + s.buffers for s in states), reverse=True)
    most = sum(each[: chunks_of(plan)]) + states[0].inputs
    if most >= limit:
        raise PlanError(
            where="schedule='auto'",
            what=f"parameters, gradients and optimizer need {most:,} bytes on a rank, of {limit:,}",
            why="nothing is left for activations",
            do="Cut the model over more ranks, shard the optimizer's states, or raise "
            "memory_bytes.",
        )
    return float(limit - most)


def _check_kinds(local: Graph, order: Schedule) -> None:
    """A training step needs backwards, an inference none."""
    trains = bool(local.grads)
    if trains != bool(order.kinds - {"F"}):
        raise PlanError(
            where=f"schedule={order.name!r}",
            what="it has no backwards" if trains else "it has backwards, and this graph has none",
            why="the graph is a training step" if trains else "there is no loss to train with",
            do="Take 1f1b." if trains else "Take forward-only.",
        )
