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
    with_send_costs,
)
from partc.errors import PlanError
from partc.graph import Graph
from partc.graph.folds import likes_of
from partc.graph.tied import Tied, tied_parameters
from partc.passes.overlap.order_step import (
    GAIN,
    PIECES,
    fastest,
    most_gained,
    start_seconds,
)
from partc.passes.overlap.take_turns import awaited_in_blocks, take_turns
from partc.passes.runner import State, run
from partc.passes.stages.choose_stages import AUTO, chunks_of, named_schedule, pipeline_ranks
from partc.passes.stages.early_sums import with_early_sums
from partc.plan import Plan
from partc.plan.mesh import Mesh
from partc.schedules import Schedule
from partc.schedules.auto import auto

TURNS = ("F", "B", "W")  # the phases of each microbatch


@dataclass(frozen=True)
class Stages:
    """What is known of all stages before any program is printed."""

    state: State  # whose ``stages`` are the scheduled graphs
    tied: list[Tied]
    costs: tuple[StageCost, ...]
    step: Step
    pieces: int = 1  # in how many blocks are computed that wait for activations

    @property
    def graphs(self) -> list[Graph]:
        """The scheduled graph of each stage."""
        return self.state.stages


def stage_ways(state: State) -> Iterator[Stages]:
    """The stages as the step is fastest, and where their blocks are in pieces that nobody asked
    for, as they are without, should that need less memory.
    """
    plan = state.plan
    whole = schedule_stages(state)
    if plan.pieces or not _may_gain(state, whole):
        yield replace(whole, pieces=max(plan.pieces, 1))
        return
    ways = {1: whole}

    def seconds(num: int) -> float:
        if num not in ways:
            ways[num] = schedule_stages(replace(state, plan=plan.changed(pieces=num)))
        return ways[num].step.simulated.makespan

    best = fastest(seconds)
    yield replace(ways[best], pieces=best)
    if best > 1:
        yield whole


def _may_gain(state: State, whole: Stages) -> bool:
    """Whether to try blocks in pieces in all stages: not where too little time is left to save, or
    too little is saved in the stage that most are like.
    """
    mesh = _mesh(state.plan)
    if _most_gained(whole, mesh) <= GAIN:
        return False
    likes = likes_of(state.graph.kept, len(whole.graphs))
    (like, num), *_ = Counter(likes).most_common(1)
    if num == 1:
        return True
    trial = state.beside(pieces=1, split_backward="W" in whole.step.schedule.kinds, phased=True)
    stage = run(trial, "split_stages").stages[like]
    take_turns(stage, PIECES[0])
    trial.stages = [stage]
    (in_pieces,) = run(trial, "hierarchical_all_reduce_stages", "overlap_collectives").stages
    before, after = (
        stage_cost(graph, mesh) for graph in (whole.graphs[likes.index(like)], in_pieces)
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


def schedule_stages(state: State) -> Stages:
    """Cut the graph at the plan's stages and prove that the plan's schedule of them finishes."""
    order = named_schedule(state.plan)
    if state.plan.schedule == AUTO:
        return _auto(state)
    _check_kinds(state.graph, order)
    cut = stage_graphs(state, "W" in order.kinds)
    return planned(cut, _costs(cut, order.rank_of), order)


def stage_graphs(state: State, split_backward: bool) -> State:
    """A state with the scheduled graph of each stage."""
    pieces = max(state.plan.pieces, 1)
    copy = state.copied if pieces > 1 else state.beside
    trial = copy(pieces=pieces, split_backward=split_backward, phased=True)
    return run(trial, "take_turns", "repeat_stages")


def _costs(cut: State, rank_of: Sequence[int]) -> tuple[StageCost, ...]:
    """The costs of every stage on its own devices; those that are alike compute the same there."""
    graphs, mesh = cut.stages, _mesh(cut.plan)
    meshes = [mesh.at_place(rank) for rank in rank_of]
    alike = list(
        zip(likes_of(cut.graph.kept, len(graphs)), (m.hardware for m in meshes), strict=True)
    )
    compiled = dict(zip(alike, zip(graphs, meshes, strict=True), strict=True))
    costs = {key: stage_cost(*each) for key, each in compiled.items()}
    return with_send_costs([costs[key] for key in alike], mesh)


def planned(cut: State, costs: tuple[StageCost, ...], order: Schedule) -> Stages:
    """Lower and simulate a schedule of stages with these costs."""
    mesh = _mesh(cut.plan)
    tied = [one.name for one in tied_parameters(cut.stages)]
    costs = with_early_sums(cut.stages, costs, order, mesh, tied)
    stages = _planned(cut, costs, order)
    shared = sharing_costs(costs, stages.step, mesh.hardware.sharing)
    return stages if shared is None else _planned(cut, shared, order)


def _planned(cut: State, costs: tuple[StageCost, ...], order: Schedule) -> Stages:
    ends = [cost.closing_s for cost in costs]
    graphs, link = cut.stages, stage_link(costs, _mesh(cut.plan))
    tied = tied_parameters(graphs)
    closing_s = closing_seconds(graphs, tied, order, ends, link)
    closing = closing_collectives(graphs, tied, order)
    step = plan_step(order, step_costs(costs, closing_s, link), closing)
    return Stages(cut, tied, costs, step)


def _auto(state: State) -> Stages:
    """The best order for what the stages cost; whether split backwards pay is its choice."""
    plan = state.plan
    cut = stage_graphs(state, True)
    rank_of = named_schedule(plan).rank_of
    costs = _costs(cut, rank_of)
    order = auto(
        step_costs(costs, {}, stage_link(costs, _mesh(plan))), ranks=pipeline_ranks(plan),
        microbatches=plan.microbatches, memory_cap=_left_for_activations(cut.stages, plan),
    )  # fmt: skip
    if "W" in order.kinds:
        return planned(cut, costs, order)
    cut = stage_graphs(state, False)
    return planned(cut, _costs(cut, rank_of), order)


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
