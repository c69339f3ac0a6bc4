"""Turn a pipeline schedule into each rank's list of actions, check the lists, simulate a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from partc.errors import PlanError
from partc.graph import Graph, collectives, fake_of, value
from partc.graph.tied import Tied
from partc.schedules import Schedule
from partc.schedules.check_programs import check_programs
from partc.schedules.lower import lower
from partc.schedules.programs import Collective, RankProgram, Wiring
from partc.schedules.sends import Sends
from partc.schedules.simulate import Simulated, simulate
from partc.schedules.step_costs import Link, StepCosts


@dataclass(frozen=True)
class Step:
    """A pipeline's step: the actions of every rank in order, and when each runs, simulated."""

    schedule: Schedule
    programs: tuple[RankProgram, ...]
    simulated: Simulated

    @property
    def wiring(self) -> Wiring:
        return self.programs[0].wiring


def plan_step(
    schedule: Schedule,
    costs: StepCosts,
    closing: Sequence[Collective] = (),
    sends: Sends | None = None,
) -> Step:
    """Add sends, receives and ``closing`` collectives to a schedule; check and simulate the result.

    ``sends`` says how many messages of each link may be under way; None: the least numbers that
    lose no time at these costs. PlanError where two neighbouring stages run the microbatches in
    different orders. CheckError, with the cycle of waits, where the ranks would deadlock.
    """
    check_queues(schedule)
    programs = lower(schedule, costs=costs, collectives=closing, sends=sends)
    check_programs(programs)
    return Step(schedule, programs, simulate(programs, costs))


def check_queues(schedule: Schedule) -> None:
    """Raise PlanError where neighbouring stages run the microbatches in different orders.

    Generated programs receive a neighbour's tensors as a queue: first sent, first received. Both
    the forwards and the backwards of two stages therefore need one order of microbatches.
    """
    runs = _microbatches(schedule)
    for stage in range(schedule.stages - 1):
        for way, kinds in (("forward", "F"), ("backward", "BI")):
            here, there = ([m for k, m in runs[s] if k in kinds] for s in (stage, stage + 1))
            if here != there:
                at = next(i for i, (a, b) in enumerate(zip(here, there, strict=True)) if a != b)
                raise PlanError(
                    where=f"schedule {schedule.name}, stages {stage} and {stage + 1}",
                    what=f"they run the {way}s of microbatches in different orders",
                    why=f"number {at} is microbatch {here[at]} on stage {stage} and {there[at]} on "
                    f"stage {stage + 1}, and what passes between stages stays in order",
                    do="Let all stages take the microbatches in one order.",
                )


def _microbatches(schedule: Schedule) -> list[list[tuple[str, int]]]:
    """Per stage, its actions in order: the kind (F, B, I, W) and the microbatch of each."""
    runs: list[list[tuple[str, int]]] = [[] for _ in range(schedule.stages)]
    for order in schedule.orders:
        for stage, kind, microbatch in order:
            runs[stage].append((kind, microbatch))
    return runs


def in_flight(schedule: Schedule) -> list[int]:
    """Per stage, the largest number of microbatches between their forward and their backward."""
    most = []
    for run in _microbatches(schedule):
        now = peak = 0
        for kind, _ in run:
            now += (kind == "F") - (kind in "BI")
            peak = max(peak, now)
        most.append(peak)
    return most


def closing_collectives(
    graphs: Sequence[Graph], tied: Sequence[Tied], schedule: Schedule
) -> list[Collective]:
    """The collectives of a pipeline after all microbatches, in the order in which ranks run them.

    First each stage's gradient reductions: one entry per stage with one member, as they stay among
    the stage's own ranks. Then the gradients of tied parameters, then the loss with its extras.
    """
    rank_of = schedule.rank_of
    found = [
        Collective(gradients_of(stage), (), (rank_of[stage],))
        for rank in range(schedule.ranks)
        for stage in schedule.stages_of(rank)
        if any(end_collectives(graphs[stage]))
    ]
    for one in tied:
        ranks = one.ranks(schedule)
        if len(ranks) > 1:
            found.append(Collective(tied_name(one), (), ranks))
    if schedule.ranks > 1:
        names = ("loss", *_extras(graphs))
        found += [Collective(name, (), tuple(range(schedule.ranks))) for name in names]
    return found


def _extras(graphs: Sequence[Graph]) -> dict[str, int]:
    """The bytes of what a training step returns beside its loss, by the name of its broadcast."""
    trains = any(graph.loss is not None for graph in graphs)
    found = (each for graph in graphs for each in graph.outputs.results.items() if trains)
    return {f"extra {name}": int(fake_of(node).nbytes) for name, node in found}


def end_collectives(graph: Graph) -> Iterator[fx.Node]:
    """The collectives that a stage runs once, after all microbatches (phase E)."""
    for node in graph.calls():
        if node.target in collectives.COLLECTIVES and value(node).phase == "E":
            yield node


def closing_seconds(
    graphs: Sequence[Graph],
    tied: Sequence[Tied],
    schedule: Schedule,
    ends: Sequence[float],
    link: Link,
) -> dict[str, float]:
    """Seconds of each collective of ``closing_collectives``, by name.

    ``ends``: seconds of each stage's own gradient reductions.
    """
    times = {gradients_of(stage): seconds for stage, seconds in enumerate(ends)}
    for one in tied:
        fake = fake_of(graphs[one.stages[0]].params[one.name])
        others = len(one.ranks(schedule)) - 1
        times[tied_name(one)] = others * link.seconds(fake.numel() * fake.element_size())
    extras = {name: link.seconds(size) for name, size in _extras(graphs).items()}
    return times | {"loss": link.seconds(0)} | extras


def gradients_of(stage: int) -> str:
    return f"gradients of stage {stage}"


def tied_name(one: Tied) -> str:
    return f"gradient of tied {one.name}"
