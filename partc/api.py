"""``partc.compile``: the whole line from a model to rank programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from torch import nn

from partc.checks.local_graph import check
from partc.codegen.files.emit import emit
from partc.codegen.files.header import header, stage_header
from partc.codegen.files.pipeline import Pipeline, file_name
from partc.collecting import no_collecting
from partc.cost.memory_limit import Peak, check_memory, fits, memory_limits
from partc.cost.prediction import Work, trained_bytes
from partc.cost.record_tape import record_phases, record_step
from partc.cost.storage import replay
from partc.cost.tape import Tape
from partc.errors import MemoryLimitError, PlanError
from partc.graph import Graph, value
from partc.graph.folds import likes_of
from partc.graph.graph_edits import copied
from partc.lowering import localize, staged_plan
from partc.machines.objective import Objective, objective_of
from partc.passes.canonical.fold_layers import Unfolded, check_plan
from partc.passes.overlap.messages import with_messages
from partc.passes.overlap.order_step import order_step
from partc.passes.overlap.prefetch import prefetches
from partc.passes.overlap.take_turns import in_turns
from partc.passes.search.plans.choose_plan import AUTO_PLAN, can_search, choose_plan
from partc.passes.search.plans.infeasible import too_large
from partc.passes.search.plans.plans_by_hand import by_hand
from partc.passes.search.plans.search_plans import Taken
from partc.passes.stages.choose_stages import is_pipeline
from partc.passes.stages.keep_stages import keep_stages
from partc.passes.stages.schedule_stages import Stages, stage_ways
from partc.plan import COMPILERS, Plan
from partc.plan.mesh import PP, Mesh, MeshLike
from partc.plan.sharding import dtype_name
from partc.program import Program
from partc.program.basis import Basis
from partc.program.check_complete import check_complete, trained
from partc.program.role import Role
from partc.reports.cost import cost_report
from partc.reports.pipeline_cost import pipeline_cost, trained_bytes_of
from partc.schedules.csv_form import write_csv
from partc.trace.fingerprint import Fingerprint
from partc.traced import Traced

ROLE = "stage0.py"  # plans with one stage have one role: every rank runs the same file


def compile(
    model: nn.Module | Traced,
    mesh: MeshLike,
    inputs: Any = None,
    *,
    loss: Callable[..., Any] | None = None,
    plan: str | Path | Plan = "auto",
    microbatches: int | None = None,
    schedule: str | None = None,
    stages: Sequence[str] | None = None,
    chunks: int | None = None,
    memory_bytes: int | None = None,
    recompute: str | Sequence[str] | None = None,
    batch_norm: str | None = None,
    compile: str | None = None,
    objective: str = "time",
    strict: bool = False,
) -> Program:
    """Compile one training step of ``model`` (its weights are not needed) for a mesh.

    A ``Traced`` step stands for model, inputs and loss where several plans are compiled.
    ``mesh``: a Mesh, DeviceMesh, dict, ``"dp=2,tp=2"`` or a mesh.toml; one that is open, as
    ``Mesh.load("dgx-h100", 64)``, leaves its axes to the plan. ``inputs``: example tensors of the
    global batch, real, fake or meta. ``loss(model, *inputs)`` gives a scalar; None takes the
    model's own ``.loss``. ``plan``: "auto", which searches for the fastest step that fits, a
    preset's words (``"fsdp+megatron"``), a Plan, its text, or a plan.toml's path. With an axis
    ``pp`` or several microbatches the step is a pipeline: ``schedule`` names its order ("auto"
    makes one for the stages' costs, a path that ends in ``.csv`` is a file with your own, as
    torch's pipelining writes them; without one it is 1f1b, or forward-only for inference),
    ``stages`` the module paths at which stages 1, 2, ... begin; without them stages are cut evenly
    by cost, ``chunks`` on each rank. A program whose predicted peak on any rank, with AdamW's
    states, is beyond ``memory_bytes`` is refused. ``recompute`` is what the backward computes
    again instead of reading it (activation checkpointing): "cheap" values, "none", "attention",
    each whole "block", or what the modules at these paths compute. ``compile="inductor"`` leaves
    what the program computes between transfers to torch.compile, each block once. ``objective``:
    what "auto" makes least, the "time" of a step, or "dollars" or "energy" of a token, for which
    an open mesh may be used in part. Raises a PartcError in four parts: TraceError, PlanError,
    ShardingError or CheckError.
    """
    wanted = read_plan(plan)
    given: dict[str, Any] = {
        "microbatches": microbatches,
        "recompute": recompute if isinstance(recompute, str | None) else tuple(recompute),
        "batch_norm": batch_norm,
        "compile": compile,
        "schedule": schedule,
        "stages": None if stages is None else tuple(stages),
        "chunks": chunks,
        "memory_bytes": memory_bytes,
    }
    if schedule is not None:
        given["order"] = ""  # that of another schedule
    given = {name: each for name, each in given.items() if each is not None}
    wanted = wanted.changed(**given).with_order()
    job = _Job(Traced.of(model, inputs, loss), strict)
    if wanted.compile not in COMPILERS:
        raise _no_compiler(wanted.compile)
    aim = objective_of(objective)
    with no_collecting():
        if wanted.preset == AUTO_PLAN:
            return job.with_search(Mesh.of(mesh), wanted, microbatches, aim)
        if aim != "time":
            raise _nothing_to_choose(aim, wanted)
        return job.with_plan(Mesh.of(mesh).settled(wanted.mesh), wanted)


@dataclass(frozen=True)
class _Job:
    """What is compiled; every attempt has a graph of its own, as the steps behind change it."""

    step: Traced
    strict: bool

    def with_search(
        self, mesh: Mesh, plan: Plan, microbatches: int | None, objective: Objective
    ) -> Program:
        """Compile the best plan that is found, or the next best where its program is too large."""
        graph = self._traced(plan)
        if graph.loss is None or not can_search(mesh, plan):
            return self.with_plan(mesh.settled(plan.mesh), plan, graph)
        choice = choose_plan(graph, mesh, plan, microbatches, objective)
        ways = zip(choice.ways(graph, mesh, plan), choice.ranked, strict=True)
        for (at, each), taken in ways:
            try:
                return self.with_plan(at, each, graph, Taken(choice.search, taken.candidate, True))
            except MemoryLimitError:
                if taken is choice.ranked[-1]:
                    raise
                graph = self._traced(plan)
        raise AssertionError("a choice has a candidate")

    def with_plan(
        self, mesh: Mesh, plan: Plan, graph: Graph | None = None, taken: Taken | None = None
    ) -> Program:
        """Compile a plan; ``graph`` is the model as traced, if it has been, ``taken`` the candidate
        that the plan is, if one was searched.
        """
        graph = graph or self._traced(plan)
        graph.mesh = mesh
        find = partial(by_hand, copied(graph), mesh, plan) if taken is None else lambda: taken
        fingerprint, work, names = Fingerprint.of(self.step.model), Work.of(graph), trained(graph)
        compile_rest = compile_pipeline if is_pipeline(plan, mesh) else compile_stage
        try:
            at, graph = self._staged(graph, plan)
            program = compile_rest(graph, at, fingerprint, work, strict=self.strict)
        except MemoryLimitError as error:
            raise error if taken else too_large(error, find()) from None
        except Unfolded:
            graph = self.step.graph()
            graph.mesh = mesh
            program = compile_rest(graph, plan, fingerprint, work, strict=self.strict)
        check_complete(names, program)
        return replace(program, basis=replace(program.basis, find=find))

    def _traced(self, plan: Plan) -> Graph:
        return self.step.graph(fold=not plan.names_blocks)

    def _staged(self, graph: Graph, plan: Plan) -> tuple[Plan, Graph]:
        """For several stages: the plan that says where they begin, and a graph of those that stand
        for all. Unfolded if a folded graph cannot be cut there.
        """
        if not graph.folds or not is_pipeline(plan, graph.mesh):
            return plan, graph
        full = staged_plan(graph, plan)
        if not full.stages:
            return plan, graph
        kept = keep_stages(graph, full.stages)
        if kept is None:
            raise Unfolded(full.stages[0])
        mesh, graph = graph.mesh, self.step.graph(kept=kept)
        graph.mesh = mesh
        return plan.changed(schedule=full.schedule, stages=full.stages), graph


def _no_compiler(name: str) -> PlanError:
    return PlanError(
        where=f"compile={name!r}",
        what="there is no such compiler",
        why=f"there are {', '.join(COMPILERS)}",
        do='Take compile="inductor", or leave it out.',
    )


def _nothing_to_choose(objective: str, plan: Plan) -> PlanError:
    return PlanError(
        where=f"objective {objective!r}",
        what=f"the plan {plan.preset!r} leaves nothing to choose",
        why='an objective is what plan="auto" searches for',
        do='Take plan="auto", or leave the objective out.',
    )


def compile_stage(
    graph: Graph, plan: Plan, fingerprint: Fingerprint, work: Work, *, strict: bool = False
) -> Program:
    """The rest of ``compile`` for one stage: every rank runs the same role."""
    mesh = graph.mesh
    full, local = localize(graph, plan, strict=strict)
    limits = memory_limits(mesh, full.memory_bytes)
    for way in _ways(local, full, mesh):
        full, ordered, tape = way
        full = with_messages(full, [tape], mesh)
        source = emit(
            ordered, header=header(ordered, full), prefetch=full.prefetch,
            messages=bool(full.messages), inductor=full.compile == "inductor",
        )  # fmt: skip
        cost = cost_report(
            ordered, role=Role.load(source, ROLE), work=work, mesh=mesh, prefetch=full.prefetch
        )
        if fits(cost.peaks(), limits):
            break
    check_memory(cost.peaks(), limits)
    return Program(
        plan=str(full),
        mesh=mesh,
        basis=Basis(
            str(mesh.hardware), (replace(tape, prefetch=full.prefetch),), (trained_bytes(ordered),)
        ),
        sources={ROLE: source},
        roles=((mesh.num_ranks, ROLE),),
        cost=cost,
        model=graph.model,
        fingerprint=fingerprint,
        constants=graph.constants,
        inputs={n: (value(i).shape, dtype_name(value(i).dtype)) for n, i in graph.inputs.items()},
    )


def compile_pipeline(
    graph: Graph, plan: Plan, fingerprint: Fingerprint, work: Work, *, strict: bool = False
) -> Program:
    """The rest of ``compile`` for several stages or microbatches: one role for pipeline ranks that
    do the same.

    Every schedule is proved to finish before anything is printed: CheckError or PlanError names who
    would wait for whom.
    """
    mesh = graph.mesh
    full, local = localize(graph, plan, strict=strict)
    check_plan(local, full)
    if local.kept:
        full = full.changed(params=local.kept.spread(full.params))
    limits = memory_limits(mesh, full.memory_bytes)
    for stages in stage_ways(local, full):
        at = _in_pieces(full, stages.pieces, stages.graphs)
        likes = likes_of(local.kept, len(stages.graphs))
        program, peaks = _of_stages(graph, mesh, at, stages, likes, work)
        if fits(peaks, limits):
            break
    check_memory(peaks, limits)
    return replace(program, fingerprint=fingerprint)


def _of_stages(
    graph: Graph, mesh: Mesh, plan: Plan, stages: Stages, numbers: Sequence[int], work: Work
) -> tuple[Program, list[Peak]]:
    """The program of scheduled stages, and the peak of every pipeline rank; ``numbers`` are those
    of the stages that each is like.
    """
    graphs, order = stages.graphs, stages.step.schedule
    compiled = dict(zip(numbers, graphs, strict=True))
    for stage in compiled.values():
        check(stage)
    tapes = {number: record_phases(each, replay(each)) for number, each in compiled.items()}
    plan = with_messages(plan, [*tapes.values()], mesh)
    pipeline = Pipeline(
        graphs, stages.tied, order, mesh, stages.step.wiring, plan.join_mb,
        messages=bool(plan.messages), inductor=plan.compile == "inductor",
    )  # fmt: skip
    files = {file_name(ranks): ranks for ranks in pipeline.groups()}
    sources = {
        name: pipeline.emit(ranks, header=stage_header(graphs, order, ranks, plan))
        for name, ranks in files.items()
    }
    name_of = {rank: name for name, ranks in files.items() for rank in ranks}
    roles = [Role.load(sources[name_of[rank]], name_of[rank], rank) for rank in range(order.ranks)]
    cost = pipeline_cost(graphs, stages.costs, stages.step, roles, mesh, work=work)
    at = [name_of[coords.get(PP, 0)] for coords in mesh.all_coords()]
    program = Program(
        plan=str(plan),
        mesh=mesh,
        basis=Basis(
            str(mesh.hardware),
            tuple(tapes[number] for number in numbers),
            tuple(trained_bytes_of(graphs, order.stages_of(rank)) for rank in range(order.ranks)),
        ),
        sources=sources,
        roles=tuple((len(list(run)), name) for name, run in groupby(at)),
        cost=cost,
        model=graph.model,
        constants=graph.constants,
        inputs={n: (value(i).shape, dtype_name(value(i).dtype)) for n, i in graph.inputs.items()},
        schedule=write_csv(order),
    )
    return program, cost.peaks()


def partition(graph: Graph, plan: Plan, *, strict: bool = False) -> tuple[Plan, Graph]:
    """Complete a plan for a traced graph and make the scheduled local graph of one rank."""
    over = graph.mesh
    full, local = localize(graph, plan, strict=strict)
    pieces, ordered = next(order_step(local, full, over))
    return _in_pieces(full, pieces, [ordered]), ordered


def _ways(local: Graph, plan: Plan, over: Mesh) -> Iterator[tuple[Plan, Graph, Tape]]:
    """The step as it is fastest, and as it needs less memory, the least last."""
    for pieces, ordered in order_step(local, plan, over):
        check_plan(ordered, plan)
        check(ordered)
        tape = record_step(ordered, replay(ordered))
        noted = _in_pieces(plan, pieces, [ordered])
        for prefetch in prefetches(plan, tape, over):
            yield noted.changed(prefetch=prefetch), ordered, tape


def _in_pieces(plan: Plan, pieces: int, graphs: Sequence[Graph]) -> Plan:
    """A plan that says in how many pieces blocks are computed, and if the ones that it asks for do
    not exist.
    """
    if plan.pieces > 1 and not any(map(in_turns, graphs)):
        note = f"no block waits for sums that {plan.pieces} pieces of it could hide"
        return plan.changed(notes=(*plan.notes, note))
    return plan.changed(pieces=pieces) if pieces > 1 else plan


def read_plan(plan: str | Path | Plan) -> Plan:
    """A Plan from a Plan, a preset's words, a plan's text or the path of a plan.toml."""
    if isinstance(plan, Plan):
        return plan
    if isinstance(plan, Path) or plan.endswith(".toml"):
        return Plan.load(plan)
    if "\n" in plan:
        return Plan.parse(plan)
    if plan == AUTO_PLAN:
        return Plan(preset=AUTO_PLAN)
    if not plan:
        raise PlanError(
            where="plan",
            what="the plan is empty",
            why="nothing says how to cut the model",
            do='Name a preset, for example plan="fsdp+megatron".',
        )
    return Plan(preset=plan)
