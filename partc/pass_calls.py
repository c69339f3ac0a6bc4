"""Passes that only hand a state's things to functions of other names or other arguments.

Each is one row of the table in ``partc/lowering.py``; parameters are asked for by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, TypeVar

from partc.checks.local_graph import check
from partc.cost.record_events import record_phases, record_step
from partc.cost.step_events import StepEvents
from partc.cost.storage import replay
from partc.graph import NO_GRADIENT, Graph
from partc.graph.folds import RepeatedBlocks, TracedStages, likes_of
from partc.machines.objective import Objective
from partc.passes.canonical import dedupe_layers as folding
from partc.passes.overlap import messages
from partc.passes.overlap import overlap_collectives as filling
from partc.passes.overlap import place_waits as placing
from partc.passes.overlap import take_turns as turning
from partc.passes.overlap.overlap_clock import call_flops
from partc.passes.runner import Table
from partc.passes.search.plans import choose_plan as choosing
from partc.passes.shard import propagate as sharding
from partc.passes.shard.local_batch_norm import check_statistics as check_batch_norms
from partc.passes.shard.local_batch_norm import has_batch_norm
from partc.passes.shard.results import notes_on_extras
from partc.passes.stages import assign_stages as assigning
from partc.passes.stages import keep_stages as keeping
from partc.passes.stages import repeat_stages as repeating
from partc.plan import Plan
from partc.plan.mesh import Mesh, layout_mesh
from partc.trace import capture as capturing
from partc.trace import record as recording
from partc.trace import scan_blocks as scanning
from partc.trace.record import Source
from partc.trace.returns import EXTRA
from partc.users_line import warn

Function = TypeVar("Function", bound=Callable[..., Any])


def calls(function: Callable[..., Any]) -> Callable[[Function], Function]:
    """A decorator that says which function does a pass's work: the table shows that one's file."""

    def mark(pass_call: Function) -> Function:
        pass_call.__wrapped__ = function  # type: ignore[attr-defined]
        return pass_call

    return mark


# model to joint graph ---------------------------------------------------------------------------
@calls(scanning.spare_blocks)
def spare_blocks(source: Source) -> dict[str, object]:
    """Find the blocks that need not be recorded, since they compute what the one before does."""
    return {"left_out": source.spare_blocks()}


@calls(capturing.record)
def record(source: Source, left_out: Sequence[RepeatedBlocks]) -> dict[str, object]:
    """Run the step once on fake tensors and note every op with its module and line."""
    graph, numbers = source.recorded(left_out)
    return {"graph": graph, "numbers": numbers}


@calls(recording.keep_known_buffers)
def keep_known_buffers(graph: Graph, source: Source, left_out: Sequence[RepeatedBlocks]) -> None:
    """Keep the values of small buffers that no step changes."""
    recording.keep_known_buffers(graph, source.model, left_out)


@calls(folding.dedupe_layers)
def dedupe_layers(graph: Graph, left_out: Sequence[RepeatedBlocks]) -> None:
    """Leave out the middle of every list of equal blocks."""
    folding.dedupe_layers(graph, left_out)


@calls(folding.confirm)
def confirm_folds(graph: Graph, kept: TracedStages) -> None:
    """Look that what was left out of stages on trust is equal in the backward too."""
    folding.confirm(graph, kept)


# plan and stages --------------------------------------------------------------------------------
@calls(choosing.choose_plan)
def choose_plan(
    graph: Graph, mesh: Mesh, plan: Plan, microbatches: int | None, objective: Objective,
    table: Table,
) -> dict[str, object]:  # fmt: skip
    """Search for the best plans that fit."""
    found = choosing.choose_plan(graph, mesh, plan, table, microbatches, objective)
    return {"choice": found}


def place_on_mesh(graph: Graph, mesh: Mesh) -> None:
    """Give the graph the mesh of all ranks, which its first line shows from here on."""
    graph.mesh = mesh


@calls(keeping.keep_stages)
def keep_stages(graph: Graph, plan: Plan) -> dict[str, object]:
    """Find which stages stand for all, so that the model is traced again with those alone."""
    return {"kept": keeping.keep_stages(graph, plan.stages)}


@calls(assigning.assign_stages)
def assign_stages(graph: Graph, plan: Plan) -> None:
    """Say of every call which stage computes it."""
    points = graph.kept.points if graph.kept else plan.stages
    assigning.assign_stages(graph, points, {} if graph.kept else plan.homes)


@calls(layout_mesh)
def lay_out(graph: Graph, plan: Plan) -> None:
    """Give the graph the axes that values are cut along: one stage's ranks, and microbatches."""
    graph.mesh = layout_mesh(graph.mesh, plan.microbatches)


@calls(has_batch_norm)
def use_local_statistics(plan: Plan, graph: Graph) -> Plan:
    """Let batch norms use each microbatch's own statistics: those of others are not there yet.

    Where the plan did not ask for that, a warning says so: losses are not those of one device.
    """
    if not has_batch_norm(graph):
        return plan
    note = "BatchNorm uses the statistics of each rank's piece of each microbatch, one by one"
    if plan.batch_norm == "global":
        rest = (
            "so losses differ from those of the whole batch. Take one microbatch, or another norm "
        )
        rest += "(GroupNorm, LayerNorm); batch_norm='local' says that it is meant so"
        warn(f"microbatches={plan.microbatches}: {note}, {rest}")
    return plan.changed(batch_norm="local", notes=(*plan.notes, note))


@calls(check_batch_norms)
def check_statistics(graph: Graph, plan: Plan) -> None:
    """Refuse batch norms that would see one value per channel."""
    ranks = prod(size for axis, size in graph.mesh.axes if axis in plan.batch_axes)
    check_batch_norms(graph, ranks, plan.microbatches)


# joint graph to local graph ---------------------------------------------------------------------
@calls(sharding.propagate)
def propagate(graph: Graph, plan: Plan, strict: bool) -> dict[str, object]:
    """Choose a sharding for every value, from the plan's entries and the rules."""
    told = [*plan.notes, *graph.frozen, *_untrained(graph)]
    choices = sharding.propagate(graph, plan, strict=strict, warnings=told)
    notes = [note for note in told if not note.startswith(EXTRA)]  # of an earlier compile
    notes += notes_on_extras(graph, plan)
    return {"choices": choices, "plan": plan.changed(notes=tuple(dict.fromkeys(notes)))}


def _untrained(graph: Graph) -> list[str]:
    """A note of parameters that no step will change; of many the first, as a fold has not all."""
    if not graph.untrained:
        return []
    first, *others = graph.untrained
    names = f"{first} and others have" if others else f"{first} has"
    return [f"{names} no gradient: {NO_GRADIENT}, so no optimizer changes it"]


@calls(TracedStages.spread)
def spread_params(graph: Graph, plan: Plan) -> Plan:
    """Let the plan name the parameters of all stages, not only of those that stand for others."""
    assert graph.kept is not None
    return plan.changed(params=graph.kept.spread(plan.params))


# local graph to scheduled graphs ----------------------------------------------------------------
@calls(turning.take_turns)
def take_turns(graph: Graph, plan: Plan) -> Graph:
    """Compute blocks in pieces: one computes while another's transfer runs."""
    return turning.take_turns(graph, plan.overlap_pieces)


@calls(placing.place_waits)
def place_waits(graph: Graph, phased: bool = False) -> Graph:
    """Start each transfer as soon as its operand is there, wait where its result is read."""
    return placing.place_waits(graph, phased=phased)


@calls(filling.overlap_collectives)
def overlap_collectives(graph: Graph, plan: Plan) -> Graph:
    """Move weight gradients between starts and waits, so that transfers are hidden."""
    return filling.overlap_collectives(graph, call_flops(graph, plan))


@calls(repeating.repeat_stages)
def repeat_stages(stages: list[Graph], graph: Graph) -> list[Graph]:
    """Give every stage that is like another one a graph too."""
    return repeating.repeat_stages(stages, graph)


@calls(check)
def check_stages(stages: list[Graph], graph: Graph) -> None:
    """Prove each distinct stage."""
    for stage in _distinct(stages, graph).values():
        check(stage)


def _distinct(stages: list[Graph], graph: Graph) -> dict[int, Graph]:
    """The stages that others are like, by number."""
    return dict(zip(likes_of(graph.kept, len(stages)), stages, strict=True))


# scheduled graphs to events ---------------------------------------------------------------------
@calls(record_step)
def record_events(graph: Graph) -> dict[str, object]:
    """Note the step's calls and transfers as events without tensors, for predictions."""
    return {"tapes": {0: record_step(graph, replay(graph))}}


@calls(record_phases)
def record_stage_events(stages: list[Graph], graph: Graph) -> dict[str, object]:
    """Note each stage's events, phase by phase; stages that are alike once."""
    distinct = _distinct(stages, graph).items()
    return {"tapes": {number: record_phases(each, replay(each)) for number, each in distinct}}


@calls(messages.with_backend)
def choose_backend(plan: Plan, mesh: Mesh) -> Plan:
    """Print for the library that the machines have."""
    return messages.with_backend(plan, mesh)


@calls(messages.with_messages)
def choose_messages(plan: Plan, tapes: dict[int, StepEvents], mesh: Mesh) -> Plan:
    """Let gloo's ranks send messages where its collectives' copies would cost more."""
    return messages.with_messages(plan, [*tapes.values()], mesh)
