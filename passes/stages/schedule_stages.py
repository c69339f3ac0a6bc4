"""From the local graph of all stages to stage graphs, their costs and the simulated step."""

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
from partc.passes.stages.choose_stages import (
    AUTO,
    named_schedule,
    pipeline_ranks,
    virtual_stages_of,
    with_rows,
)
from partc.passes.stages.early_sums import (
    candidates,
    choose_early_sums,
    early_costs,
    set_early_sums,
)
from partc.plan import Plan
from partc.plan.mesh import Mesh
from partc.schedules import Schedule
from partc.schedules.auto import auto
from partc.schedules.csv_form import write_csv
from partc.schedules.sends import sends_of

TURNS = ("F", "B", "W")  # the phases of each microbatch


@dataclass(frozen=True)
class Stages:
    """All stages of a pipeline: graphs, costs, and the simulated step; nothing is printed yet."""

    state: State  # whose ``stages`` are the scheduled graphs
    tied: list[Tied]
    costs: tuple[StageCost, ...]
    step: Step

    @property
    def graphs(self) -> list[Graph]:
        """The scheduled graph of each stage."""
        return self.state.stages


def stage_ways(state: State) -> Iterator[Stages]:
    """Yield the stages of the fastest step.

    If partc chose to compute blocks in pieces, not the plan, then the stages without pieces follow,
    as a fallback that may need less memory.
    """
    plan = state.plan
    if plan.overlap_pieces:
        yield schedule_stages(state)
        return
    ways = {1: schedule_stages(replace(state, plan=plan.changed(overlap_pieces=1)))}
    if not _more_seconds(ways[1]):
        ways[1].state.plan = ways[1].state.plan.changed(overlap_pieces=0)  # nothing to choose
    if not _may_gain(state, ways[1]):
        yield ways[1]
        return

    def seconds(num: int) -> float:
        if num not in ways:
            ways[num] = schedule_stages(replace(state, plan=plan.changed(overlap_pieces=num)))
        return ways[num].step.simulated.makespan

    best = fastest(seconds)
    yield ways[best]
    if best > 1:
        yield ways[1]


def _may_gain(state: State, whole: Stages) -> bool:
    """Whether to try blocks in pieces on all stages.

    Not if even the upper bound on the gain is below GAIN, or if a trial with 2 pieces on the most
    frequent stage gains less.
    """
    if _most_gained(whole) <= GAIN:
        return False
    likes = likes_of(state.graph.kept, len(whole.graphs))
    (like, num), *_ = Counter(likes).most_common(1)
    if num == 1:
        return True
    trial = state.beside(split_backward="W" in whole.step.schedule.kinds, phased=True)
    trial.plan = whole.state.plan
    stage = run(trial, "split_stages").stages[like]
    take_turns(stage, PIECES[0])
    trial.stages = [stage]
    (in_pieces,) = run(trial, "hierarchical_per_stage", "overlap_collectives").stages
    before, after = (
        stage_cost(graph, state.mesh) for graph in (whole.graphs[likes.index(like)], in_pieces)
    )
    return _turn_seconds(after) < (1 - GAIN) * _turn_seconds(before)


def _turn_seconds(cost: StageCost) -> float:
    return cost.forward_s + cost.backward_s + cost.weight_s


def _more_seconds(stages: Stages) -> Counter[str]:
    """By axis, the seconds of the starts of all transfers that a block waits for."""
    more_s: Counter[str] = Counter()
    for graph in stages.graphs:
        more_s.update(start_seconds(graph, awaited_in_blocks(graph), stages.state.mesh))
    return more_s


def _most_gained(stages: Stages) -> float:
    """An upper bound on the share of a microbatch's time that blocks in pieces can save."""
    more_s = _more_seconds(stages)
    spent = [s for cost in stages.costs for phase, s in cost.spent.items() if phase in TURNS]
    return most_gained(spent, more_s) if more_s else 0.0


def schedule_stages(state: State) -> Stages:
    """Split the graph at the plan's stages, and simulate the plan's schedule to its end.

    PlanError for a schedule with backwards for an inference graph, or without for a training step.
    """
    order = named_schedule(state.plan)
    if state.plan.schedule == AUTO and not state.plan.order:
        return _auto(state)
    _check_kinds(state.graph, order)
    state = replace(state, plan=with_rows(state.plan, order))
    cut = stage_graphs(state, "W" in order.kinds)
    return planned(cut, _costs(cut, order.rank_of), order)


def stage_graphs(state: State, split_backward: bool) -> State:
    """A state with one graph per stage, its collectives bucketed, overlapped and waited for."""
    copy = state.copied if state.plan.overlap_pieces > 1 else state.beside
    trial = copy(split_backward=split_backward, phased=True)
    return run(trial, "take_turns", "repeat_stages")


def _costs(cut: State, rank_of: Sequence[int]) -> tuple[StageCost, ...]:
    """The cost of every stage on its own devices; equal stages on equal devices are costed once."""
    graphs, mesh = cut.stages, cut.mesh
    meshes = [mesh.at_place(rank) for rank in rank_of]
    alike = list(
        zip(likes_of(cut.graph.kept, len(graphs)), (m.hardware for m in meshes), strict=True)
    )
    compiled = dict(zip(alike, zip(graphs, meshes, strict=True), strict=True))
    costs = {key: stage_cost(*each) for key, each in compiled.items()}
    return with_send_costs([costs[key] for key in alike], mesh)


def planned(cut: State, costs: tuple[StageCost, ...], order: Schedule) -> Stages:
    """Add sends and receives to a schedule, and simulate it with the costs of its stages.

    The plan of the state that comes back has the stages that sum gradients early, and how many
    messages may be under way.
    """
    mesh = cut.mesh
    early = candidates(cut.stages, costs, order, [one.name for one in tied_parameters(cut.stages)])
    plan = choose_early_sums(early, costs, order, cut.plan, mesh)
    set_early_sums(cut.stages, early, plan)
    cut = replace(cut, plan=plan)
    costs = early_costs(early, costs, order, plan, mesh)
    stages = _planned(cut, costs, order)
    shared = sharing_costs(costs, stages.step, mesh.hardware.sharing)
    stages = stages if shared is None else _planned(cut, shared, order)
    return replace(stages, state=replace(cut, plan=with_sends(plan, stages.step)))


def with_sends(plan: Plan, step: Step) -> Plan:
    """The plan with ``sends`` set to what loses no time, if it does not say so."""
    sends = sends_of(step.wiring, backward=step.schedule.kinds != {"F"})
    return plan.changed(sends=sends) if plan.sends is None and sends else plan


def _planned(cut: State, costs: tuple[StageCost, ...], order: Schedule) -> Stages:
    ends = [cost.closing_s for cost in costs]
    graphs, link = cut.stages, stage_link(costs, cut.mesh)
    tied = tied_parameters(graphs)
    closing_s = closing_seconds(graphs, tied, order, ends, link)
    closing = closing_collectives(graphs, tied, order)
    step = plan_step(order, step_costs(costs, closing_s, link), closing, cut.plan.sends)
    return Stages(cut, tied, costs, step)


def _auto(state: State) -> Stages:
    """Make the schedule ``auto`` for the costs of the stages, with or without split backwards, and
    write its order into the plan.

    The stages are built with split backwards first; without, if the schedule does not use them.
    """
    plan = state.plan
    cut = stage_graphs(state, True)
    costs = _costs(cut, named_schedule(plan).rank_of)
    order = auto(
        step_costs(costs, {}, stage_link(costs, state.mesh)), ranks=pipeline_ranks(plan),
        microbatches=plan.microbatches,
        memory_cap=_left_for_activations(cut.stages, plan, state.mesh),
    )  # fmt: skip
    written = {"order": write_csv(order)}
    if "W" in order.kinds:
        return planned(replace(cut, plan=cut.plan.changed(**written)), costs, order)
    # Without split backwards the stages' graphs differ, and so do their costs.
    return schedule_stages(replace(state, plan=plan.changed(**written)))


def _left_for_activations(graphs: Sequence[Graph], plan: Plan, mesh: Mesh) -> float | None:
    """Bytes of a rank's memory left for activations beside parameters, gradients, optimizer states
    and inputs; None without a limit. Taken from the ranks with the largest stages and least memory.

    PlanError if nothing is left.
    """
    limits = memory_limits(mesh, plan.memory_bytes)
    if limits is None:
        return None
    limit = min(limits)
    states = [state_bytes(graph) for graph in graphs]
    each = sorted((s.params + s.grads + s.optimizer + s.buffers for s in states), reverse=True)
    most = sum(each[: virtual_stages_of(plan)]) + states[0].inputs
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
    """PlanError unless a training step has a schedule with backwards, and inference one without."""
    trains = bool(local.grads)
    if local.loss is not None and not trains:
        raise PlanError(
            where=f"schedule={order.name!r}", what="the step has a loss and trains no parameter",
            why="with microbatches or stages the loss comes with the backwards, and there are none",
            do="Let a parameter require its gradient, or use one stage and microbatches=1.",
        )  # fmt: skip
    if trains != bool(order.kinds - {"F"}):
        raise PlanError(
            where=f"schedule={order.name!r}",
            what="it has no backwards" if trains else "it has backwards, and this graph has none",
            why="the graph is a training step" if trains else "there is no loss to train with",
            do="Take 1f1b." if trains else "Take forward-only.",
        )
