"""Scheduled graphs and a complete plan in; the text of every role, and what it costs, out."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from partc.codegen.files.emit import emit
from partc.codegen.files.header import header, stage_header
from partc.codegen.files.island import Islands, MeetingIslands, check_names, check_real
from partc.codegen.files.late_island import LateIslands
from partc.codegen.files.pipeline import Pipeline, file_name
from partc.codegen.files.role_file import helper_file
from partc.codegen.files.served_island import ServedIslands, check_running, check_servers
from partc.codegen.files.uneven_island import UnevenIslands
from partc.cost.prediction import Work
from partc.errors import PlanError
from partc.graph import Graph
from partc.passes.overlap.take_turns import in_turns
from partc.passes.stages.schedule_stages import Stages
from partc.plan import Plan
from partc.plan.decided import GLOO
from partc.plan.mesh import Mesh
from partc.plan.servers import Servers
from partc.plan.stale import Stale
from partc.plan.uneven import Uneven
from partc.program.helper_file import helpers_of
from partc.program.role import Role
from partc.reports.cost import cost_report
from partc.reports.island_cost import Meeting, with_meeting, with_meetings
from partc.reports.pipeline_cost import pipeline_cost
from partc.trace.fingerprint import Fingerprint

ROLE = "stage0.py"  # plans with one stage have one role: every rank runs the same file


def lay_islands(
    plan: Plan,
    mesh: Mesh,
    fingerprint: Fingerprint,
    trained: frozenset[str],
    running: frozenset[str],
) -> dict[str, object]:
    """How islands meet, of which parameters."""
    how = plan.local_steps or plan.stale or plan.uneven or plan.servers
    assert how is not None
    if isinstance(how, Servers) and how.is_beside:
        check_running(running)
        return {"islands": None}  # the program is one without a server
    check_names(how, fingerprint.tensors)
    params = {
        name: prod(each.shape) for name, each in fingerprint.tensors.items() if each.kind == "param"
    }
    frozen = tuple(name for name in params if name not in trained)
    check_real(how, {n: each.dtype for n, each in fingerprint.tensors.items() if n in trained})
    made: Islands
    if isinstance(how, Uneven):
        made = UnevenIslands(num=mesh.islands, how=how, frozen=frozen, running=running)
    elif isinstance(how, Servers):
        check_servers(how, len(params) - len(frozen))
        made = ServedIslands(
            num=mesh.islands, how=how, frozen=frozen, running=running,
            serving=how.serving(mesh), workers=how.workers(mesh),
        )  # fmt: skip
    elif isinstance(how, Stale):
        made = LateIslands(num=mesh.islands, how=how, frozen=frozen, running=running)
    else:
        made = MeetingIslands.of(how, mesh.islands, params, frozen, running)
    return {"islands": made}


def print_step(
    graph: Graph, plan: Plan, mesh: Mesh, islands: Islands | None = None
) -> dict[str, object]:
    """The source of a step of one stage."""
    printed = emit(
        graph, header=header(graph, plan), mesh=mesh, prefetch=plan.prefetch,
        messages=bool(plan.messages), backend=plan.backend or GLOO,
        inductor=plan.compile == "inductor", ranges=plan.profiler_ranges,
        islands=islands,
    )  # fmt: skip
    _check_asked(plan, [printed.text])
    sources = {ROLE: printed.text, **helper_file([printed])}
    return {"sources": sources, "origins": {ROLE: printed.origins}, "files": [ROLE]}


def print_pipeline(
    plan: Plan, staged: Stages, mesh: Mesh, islands: Islands | None = None
) -> dict[str, object]:
    """The sources of all pipeline ranks: one file for those that do the same."""
    graphs, order = staged.graphs, staged.step.schedule
    pipeline = Pipeline(
        graphs, staged.tied, order, mesh, staged.step.wiring, plan.bucket_mb,
        messages=bool(plan.messages), backend=plan.backend or GLOO,
        inductor=plan.compile == "inductor", ranges=plan.profiler_ranges,
        islands=islands,
    )  # fmt: skip
    groups = {file_name(ranks): ranks for ranks in pipeline.groups()}
    printed = {
        name: pipeline.emit(ranks, header=stage_header(graphs, order, ranks, plan))
        for name, ranks in groups.items()
    }
    name_of = {rank: name for name, ranks in groups.items() for rank in ranks}
    _check_asked(plan, [each.text for each in printed.values()])
    return {
        "sources": {name: each.text for name, each in printed.items()}
        | helper_file(printed.values()),
        "origins": {name: each.origins for name, each in printed.items()},
        "files": [name_of[rank] for rank in range(order.ranks)],
    }


def _check_asked(plan: Plan, texts: Sequence[str]) -> None:
    """PlanError if ranges for a profiler are asked of a program that has nothing to enclose, or
    hooks of one whose calls torch.compile compiles.
    """
    if plan.hooks and plan.compile == "inductor":
        raise PlanError(
            where="plan, hooks", what='they do not go with compile = "inductor"',
            why="what stands between transfers is one graph then, without calls of other functions",
            do="Leave compile out, or hooks.",
        )  # fmt: skip
    if plan.profiler_ranges and not any("record_function(" in text for text in texts):
        raise PlanError(
            where="plan, profiler_ranges", what="there is nothing to put into a range",
            why="the program has no block, no transfer and no pipeline stage",
            do="Leave profiler_ranges out; torch.profiler names each op by itself.",
        )  # fmt: skip


def cost_step(
    graph: Graph, plan: Plan, mesh: Mesh, sources: dict[str, str], work: Work,
    islands: Islands | None = None,
) -> dict[str, object]:  # fmt: skip
    """What the step costs, with the peak of its source as it stands."""
    role = Role.load(sources[ROLE], ROLE, helpers=helpers_of(sources))
    report = cost_report(graph, role=role, work=work, mesh=mesh, prefetch=plan.prefetch)
    if islands is not None and graph.loss is not None:
        report = with_meeting(report, _meeting(islands, role, mesh), mesh)
    return {"cost": report}


def _meeting(islands: Islands, role: Role, mesh: Mesh) -> Meeting:
    return Meeting.of(islands.how, role, mesh, islands.frozen, islands.running)


def cost_pipeline(
    staged: Stages, mesh: Mesh, sources: dict[str, str], files: list[str], work: Work,
    islands: Islands | None = None,
) -> dict[str, object]:  # fmt: skip
    """What the step of every pipeline rank costs; ``files`` are theirs."""
    helpers = helpers_of(sources)
    roles = [
        Role.load(sources[name], name, rank, helpers=helpers) for rank, name in enumerate(files)
    ]
    costs, step = staged.costs, staged.step
    cost = pipeline_cost(staged.graphs, costs, step, roles, mesh, work=work)
    if islands is not None and any(graph.grads for graph in staged.graphs):
        meetings = [_meeting(islands, role, mesh) for role in roles]
        cost = with_meetings(cost, meetings, mesh)
    return {"cost": cost}


def noted_pieces(plan: Plan, graphs: Sequence[Graph]) -> Plan:
    """A plan with a note, if the pieces of blocks that it asks for do not exist."""
    if plan.overlap_pieces > 1 and not any(map(in_turns, graphs)):
        note = f"no block waits for sums that {plan.overlap_pieces} pieces of it could hide"
        return plan.changed(notes=tuple(dict.fromkeys((*plan.notes, note))))
    return plan
