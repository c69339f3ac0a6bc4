"""A ``Program`` of what the passes made: the printed sources, and all that is known of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

from partc.checks.draws import drawn_by
from partc.cost.prediction import trained_bytes
from partc.graph import Graph, value
from partc.graph.folds import likes_of
from partc.passes.own_passes import passes_noted
from partc.passes.runner import State
from partc.passes.stages.schedule_stages import Stages
from partc.plan import Plan
from partc.plan.batch import Dealt, dealt
from partc.plan.mesh import MICROBATCH_AXIS, PP
from partc.plan.sharding import dtype_name
from partc.program import Program
from partc.program.basis import Basis
from partc.program.user_lines import UserLines
from partc.reports.pipeline_cost import trained_bytes_of
from partc.schedules.csv_form import write_csv
from partc.schedules.named import NAMES, is_of_partc
from partc.trace.frozen_numbers import FrozenNumbers


def program_of(state: State) -> Program:
    """What was printed, with all that is known of it."""
    plan, made = _as_replayed(state.plan.changed(**passes_noted(state))), state.made
    graph: Graph = made["joint"]
    staged: Stages | None = made.get("staged")
    order = staged.step.schedule if staged else None
    files, mesh = made["files"], state.mesh
    at = [files[coords.get(PP, 0)] for coords in mesh.all_coords()]
    return Program(
        plan=str(plan),
        mesh=mesh,
        basis=_basis(state),
        sources=made["sources"],
        lines={name: UserLines(each) for name, each in made["origins"].items()},
        roles=tuple((len(list(same)), name) for name, same in groupby(at)),
        cost=made["cost"],
        model=graph.model,
        fingerprint=made["fingerprint"],
        constants=graph.constants,
        decided=tuple(sorted(graph.decided)),
        numbers=state.made.get("numbers", FrozenNumbers()),
        inputs={n: (value(i).shape, dtype_name(value(i).dtype)) for n, i in graph.inputs.items()},
        dealt=dealt(plan, graph.inputs),
        arguments=made["source"].given.arguments,
        returns=made["source"].returns.tree,
        results=_own_rows(state),
        schedule=write_csv(order) if order else "",
        draws=drawn_by(state.stages or [state.graph], graph),
    )


def _as_replayed(plan: Plan) -> Plan:
    """The plan without the name of a schedule that no rank runs, if not every process knows it."""
    not_run = plan.schedule in NAMES and not plan.order
    return plan.changed(schedule="") if not_run and not is_of_partc(plan.schedule) else plan


def _own_rows(state: State) -> dict[str, Dealt]:
    """How the results are cut of which every rank has its own rows."""
    found = {}
    for graph in state.stages or [state.graph]:
        for name, node in graph.outputs.results.items():
            lies = value(node).sharding.without([MICROBATCH_AXIS], graph.mesh)
            cuts = lies.cuts()
            found[name] = tuple((a, x.dim, lies.local_outer(a, graph.mesh)) for a, x in cuts)
    return {name: cuts for name, cuts in found.items() if cuts}


def _basis(state: State) -> Basis:
    """What the program's predictions rest on."""
    hardware, tapes = str(state.mesh.hardware), state.made["tapes"]
    if not state.stages:
        (tape,) = tapes.values()
        tape = replace(tape, prefetch=state.plan.prefetch)
        return Basis(hardware, (tape,), (trained_bytes(state.graph),))
    order = state.made["staged"].step.schedule
    return Basis(
        hardware,
        tuple(tapes[number] for number in likes_of(state.graph.kept, len(state.stages))),
        tuple(trained_bytes_of(state.stages, order.stages_of(rank)) for rank in range(order.ranks)),
    )
