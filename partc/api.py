"""``partc.compile``: the whole line from a model to rank programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from partc.assemble import program_of
from partc.collecting import no_collecting
from partc.compile_cache import Request, cache_of
from partc.cost.memory_limit import TOLERANCE, Peak, check_memory, fits, memory_limits
from partc.cost.prediction import Work
from partc.dumps import check_folder, write_dump
from partc.errors import MemoryLimitError, PartcError, PlanError
from partc.given_plan import (
    backend_at_hand,
    check_texts,
    read_plan,
    tell_of_one_microbatch,
    warn_of_idle,
    warn_of_no_training,
    with_told,
)
from partc.graph.graph_edits import copied
from partc.idle_keys import said
from partc.key_readers import TELLS
from partc.lowering import staged_plan, table
from partc.machines.objective import Objective, objective_of
from partc.own_numbers import with_own_numbers
from partc.passes.canonical.dedupe_layers import Unfolded
from partc.passes.own_passes import check_replay
from partc.passes.runner import State, Table, run
from partc.passes.search.plans.choose_plan import AUTO_PLAN, Choice, can_search
from partc.passes.search.plans.infeasible import NothingFitsError, too_large
from partc.passes.search.plans.next_best import PASSED_OVER, Attempts
from partc.passes.search.plans.plans_by_hand import by_hand
from partc.passes.search.plans.search_plans import Taken
from partc.passes.shard.tied_entries import by_first_name
from partc.passes.stages.choose_stages import is_pipeline
from partc.plan import Plan
from partc.plan.field_kinds import check_fields
from partc.plan.mesh import Mesh, MeshLike
from partc.program import Program
from partc.program.origin import Origin
from partc.program.ranks.farewell import tell_at_exit
from partc.program.stage.check_complete import check_complete, running, trained
from partc.recipe import made_by
from partc.result_rows import rows_of_results
from partc.rules.table import warn_of_lost_rules
from partc.trace.default_dtype import float32_default
from partc.trace.fingerprint import Fingerprint
from partc.trace.synced_norm import check_synced
from partc.traced import Traced
from partc.verification.expected_step import expectation
from partc.ways import compile_pipeline, compile_stage, printed_peaks
from partc.whole_batch import first_step, step_of
from partc.wrong_calls import as_path, known_arguments


@known_arguments
@float32_default()
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
    virtual_stages: int | None = None,
    memory_bytes: int | None = None,
    recompute: str | Sequence[str] | None = None,
    batch: str | None = None,
    batch_norm: str | None = None,
    random: str | None = None,
    compile: str | None = None,
    backend: str | None = None,
    objective: str = "time",
    strict: bool = False,
    dump: str | Path | None = None,
    disable: Sequence[str] = (),
    cache: str | Path | None = None,
) -> Program:
    """Compile one training step of a model for a mesh of ranks.

    Nothing runs on a device: the model may be on ``meta``, and its weights are not needed. Every
    program that comes back is proved: shapes, shardings, gradients summed over the right axes,
    every transfer waited for.

    Args:
        model: the ordinary single-device model, left as it was; or a ``Traced`` step, which stands
            for model, inputs and loss where several plans are compiled.
        mesh: the axes of ranks: ``"dp=2,tp=2"``, a dict, a Mesh, a torch DeviceMesh or the path of
            a mesh.toml. A mesh that is open (``Mesh.load("dgx-h100", 64)``) leaves its axes to the
            plan.
        inputs: example arguments, a tuple by place or a dict by name, nested as you like; tensors
            real, fake or meta, in the shapes that a step takes: of the global batch, ``f32[8,256]``
            for 8 samples on all ranks together, or with ``batch="local"`` of one rank's piece.
            Their values do not matter, all else becomes part of the program.
        loss: ``loss(model, *inputs)``, or ``**inputs`` of a dict, gives the scalar to train on, or
            ``(loss, extras)``. None: what the model returns, or its ``.loss``; under
            ``torch.no_grad()`` the forward alone is compiled.
        plan: ``"auto"`` searches for the fastest step that fits; a preset (``"fsdp"``), presets
            joined by ``+`` (``"fsdp+megatron"``), a Plan, a plan's text, or the path of a
            plan.toml, which may leave decisions open. The arguments that follow replace what it
            says; None leaves that as it is.
        microbatches: how many pieces the batch is computed in, one after the other.
        schedule: the order of a pipeline (an axis ``pp``, or several microbatches): a name such as
            ``"1f1b"``; ``"auto"``, which makes one for the stages' costs; or a path that ends in
            ``.csv``, as torch's pipelining writes it. If nothing says so: 1f1b, and forward-only
            for inference.
        stages: the module paths at which pipeline stages 1, 2, ... begin (``["blocks.4"]``). If
            nothing says so they are cut evenly by cost.
        virtual_stages: stages on each pipeline rank, where they are cut by cost.
        memory_bytes: bytes that a rank may hold at its predicted peak, AdamW's states among them.
        recompute: what the backward computes again in place of keeping it (activation
            checkpointing): ``"none"``, ``"cheap"`` values (as if nothing were said),
            ``"attention"``, each whole ``"block"``, or the paths of modules.
        batch: what a step takes: ``"global"``, the whole batch on every rank, or ``"local"``, this
            rank's own samples, as under DDP. ``Traced`` has the global batch either way.
        batch_norm: statistics over the ``"global"`` batch, as on one device, or over each rank's
            and microbatch's own piece: ``"local"``.
        random: what ranks draw of dropout and noise: the ``"pieces"`` that they hold, each with
            numbers of its own; or ``"single-device"``: each draws the whole value and takes its
            piece, so that all plans have the same numbers, and their losses can be compared.
        compile: ``"inductor"`` hands what stands between transfers to torch.compile, each block
            once; ``"none"``.
        backend: what will carry tensors between ranks, ``"gloo"`` or ``"nccl"``: a program has the
            text of one. None: that of the mesh's machines; where none are named that of the process
            group, NCCL for a model on GPUs, else gloo.
        objective: what ``plan="auto"`` makes least: the ``"time"`` of a step, or ``"dollars"`` or
            ``"energy"`` of a token, for which an open mesh may be used in part.
        strict: refuse an op that has no sharding rule and for which experiments find none; as it
            is, such an op is computed whole on every rank, with a warning.
        dump: a folder for the text of the graph behind every pass; an earlier dump is replaced.
        disable: names of passes to leave out; ``partc passes`` lists those that may be.
        cache: a folder that keeps programs. One that was made of the very same step is taken from
            it; of several ranks that find none, one compiles while the others wait. Whoever may
            write there can run code here. With ``dump`` it is not read.

    Returns:
        A Program: print its ``plan`` and ``cost``, read ``source(rank)``, ``save`` it.

    Raises:
        TraceError: the model cannot be traced, for example where it asks for a tensor's value.
        PlanError: the plan, a schedule or the mesh contradicts itself or the model; or other passes
            run than those with which the plan was made.
        ShardingError: something cannot be sharded as the plan says.
        RuleError: ``strict``, and an op without a rule.
        MemoryLimitError: the predicted peak of a rank is beyond ``memory_bytes``.
        UsageError: ``disable`` names a pass that is needed, ``dump`` a folder with other files.
        CheckError: the proof failed: a fault of partc, or of a pass from a package of yours.

    Example::

        model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
        batch = torch.randn(8, 256), torch.randn(8, 256)

        def loss_of(model, x, target):
            return nn.functional.mse_loss(model(x), target)

        program = partc.compile(model, "dp=2,tp=2", batch, loss=loss_of, plan="fsdp+megatron")
        program.save("build/mlp")
    """
    tell_at_exit()
    wanted = read_plan(plan)
    check_texts("disable", disable)
    warn_of_lost_rules()
    for name, folder in (("dump", dump), ("cache", cache)):
        if folder is not None:
            as_path(folder, f"compile({name}=...)")
    given: dict[str, Any] = {
        "microbatches": microbatches,
        "recompute": tuple(recompute) if isinstance(recompute, list) else recompute,
        "batch": batch,
        "batch_norm": batch_norm,
        "random": random,
        "compile": compile,
        "schedule": schedule,
        "stages": tuple(stages) if isinstance(stages, list) else stages,
        "virtual_stages": virtual_stages,
        "backend": backend,
        "memory_bytes": memory_bytes,
    }
    given = {name: each for name, each in given.items() if each is not None}
    check_fields(given, "compile")
    wanted = wanted.replanned(**given).with_order()
    check_synced(model, wanted.batch_norm)
    aim = objective_of(objective)
    if aim != "time" and wanted.preset != AUTO_PLAN:
        raise _nothing_to_choose(aim, wanted)
    rows = table(left_out=disable, keep_texts=dump is not None)
    check_replay(wanted, rows)
    if dump is not None:
        check_folder(dump)
    at = Mesh.of(mesh)
    if at.topology is None and at.num_ranks > 1 and not wanted.backend:
        wanted = wanted.changed(backend=backend_at_hand(model, mesh))
    made = partial(_made, model, inputs, loss, at, wanted, rows, strict, microbatches, aim, dump)
    kept = cache_of(cache, model)
    if kept is None or isinstance(model, Traced) or dump is not None:
        step, program = made()
        return made_by(step, rows.left_out, strict, kept, program, wanted.inputs)
    step = first_step(model, inputs, loss, at, wanted, rows)
    piece = None if wanted.batch == "global" else Traced(model, inputs, loss)
    asked = Request(step, piece, at, wanted, rows, (strict, microbatches, aim))
    program = kept.program(asked, lambda: made()[1])
    return made_by(step, rows.left_out, strict, kept, program, wanted.inputs)


@no_collecting()
def _made(
    model: nn.Module | Traced, inputs: Any, loss: Callable[..., Any] | None, mesh: Mesh, plan: Plan,
    rows: Table, strict: bool, microbatches: int | None, aim: Objective, dump: str | Path | None,
) -> tuple[Traced, Program]:  # fmt: skip
    """The step of all ranks' samples, and its program, compiled here."""
    step, plan = step_of(model, inputs, loss, mesh, plan, rows)
    job = Job(step, rows, strict)
    try:
        return step, job.program(mesh, plan, microbatches, aim)
    finally:
        if dump is not None and job.latest is not None:
            write_dump(job.latest, dump)


@dataclass
class Job:
    """What is compiled; every attempt has a graph of its own, as the passes change it."""

    step: Traced
    table: Table
    strict: bool
    latest: State | None = None  # the attempt that a dump shows
    printed: State | None = None  # what the program was made of
    tells: bool = False  # whether to keep what tells which keys of the plan nothing reads

    def program(
        self, mesh: Mesh, plan: Plan, microbatches: int | None, objective: Objective
    ) -> Program:
        """What ``compile`` gives."""
        if plan.mesh is not None:
            mesh = mesh.settled(plan.mesh)
        if plan.preset == AUTO_PLAN:
            found = with_told(plan, self.with_search(mesh, plan, microbatches, objective))
            if self.printed is not None:
                warn_of_no_training(self.step)
            return found
        self.tells = bool(said(plan) or (plan.preset and plan.params))
        found = self.with_plan(mesh.settled(plan.mesh), plan)
        if self.printed is not None:  # else another process has compiled it
            warn_of_idle(plan, self.printed)
            if microbatches is None:
                tell_of_one_microbatch(self.step, plan, mesh.settled(plan.mesh))
            warn_of_no_training(self.step)
        return found

    def with_search(
        self, mesh: Mesh, plan: Plan, microbatches: int | None, objective: Objective
    ) -> Program:
        """Compile the best plan that is found, or the next best where it cannot be compiled or its
        program is too large.
        """
        state = self._traced(mesh, plan)
        graph = state.graph
        plan = run(state, "find_batch").plan
        plan = by_first_name(plan, graph)
        if graph.loss is None or not can_search(mesh, plan):
            return self.with_plan(mesh.settled(plan.mesh), plan, state)
        state.made |= {"microbatches": microbatches, "objective": objective}
        try:
            choice: Choice = run(state, "choose_plan").made["choice"]
        except NothingFitsError as error:
            raise self._with_enough(error, mesh, plan) from None
        attempts = Attempts(choice)
        for one in attempts:
            at, each = choice.way(one.candidate, graph, mesh, plan, attempts.notes())
            taken = Taken(attempts.search, one.candidate, True)
            try:
                return self.with_plan(at, each, state, taken)
            except PASSED_OVER as error:
                attempts.failed(one, error)
                state = self._traced(mesh, plan)
        raise attempts.error()

    def _with_enough(self, error: NothingFitsError, mesh: Mesh, plan: Plan) -> PlanError:
        """The error with a limit that is enough: estimates are below what a program needs, so the
        candidate of least memory is compiled without one.
        """
        least, search = error.least, error.search
        if not plan.memory_bytes or least is None or search is None:
            return error
        search = replace(search, memory_bytes=0)
        state, free = self._traced(mesh, plan), plan.changed(memory_bytes=0)
        with suppress(PartcError):
            way = Choice((least,), search).way(least.candidate, state.graph, mesh, free)
            self.with_plan(*way, state, Taken(search, least.candidate, True))
            if self.printed is not None:
                return error.needing(max(each.num_bytes for each in printed_peaks(self.printed)))
        return error

    def with_plan(
        self, mesh: Mesh, plan: Plan, state: State | None = None, taken: Taken | None = None
    ) -> Program:
        """Compile a plan; ``state`` is the model as traced, if it has been, ``taken`` the candidate
        that the plan is, if one was searched.
        """
        state = self._placed(state or self._traced(mesh, plan), mesh, plan)
        plan = run(state, "find_batch").plan
        state.graph.rows = rows_of_results(self.step, state.graph, plan, mesh, self.table)
        joint = copied(state.graph)
        by_this = partial(by_hand, joint, mesh, plan, self.table)
        find = by_this if taken is None else lambda: taken
        names = trained(state.graph)
        state.made |= {
            "fingerprint": Fingerprint.of(self.step.model), "work": Work.of(state.graph),
            "trained": frozenset(names), "running": frozenset(running(state.graph)),
            TELLS: self.tells,
        }  # fmt: skip
        compile_rest = compile_pipeline if is_pipeline(plan, mesh) else compile_stage
        try:
            ways = compile_rest(self._staged(state, plan))
            program = self._fitting(ways, mesh, taken is not None)
        except MemoryLimitError as error:
            raise error if taken else too_large(error, find()) from None
        except Unfolded:
            whole = self._placed(self._traced(mesh, plan, fold=False), mesh, plan)
            whole.made = {**state.made, **whole.made}
            whole.graph.rows = joint.rows
            program = self._fitting(compile_rest(whole), mesh, taken is not None)
        check_complete(names, program)
        expected = expectation(joint, program.plan, self.step.graph, program.draws)
        basis = replace(program.basis, find=find)
        made = replace(program, basis=basis, expected=expected, origin=Origin(self.step.model))
        return with_own_numbers(made, self.step, self.table)

    def _fitting(self, ways: Iterator[State], mesh: Mesh, several: bool) -> Program:
        """Print the first of several ways that the account of memory finds to fit, else the last.

        The program's dry run confirms it, or the next way is tried: MemoryLimitError if none fits.
        Of ``several`` candidates one that the account finds too large for sure is not printed.
        """
        for way in ways:
            self._note(way)
            limits = memory_limits(mesh, way.plan.memory_bytes)
            accounted: list[Peak] | None = way.made["peaks"]
            if (accounted is None or fits(accounted, limits)) and fits(printed_peaks(way), limits):
                break
        if several and accounted is not None and "cost" not in way.made:
            check_memory(accounted, limits, margin=TOLERANCE)
        check_memory(printed_peaks(way), limits, accounted)
        self.printed = way
        return program_of(way)

    def _traced(self, mesh: Mesh, plan: Plan, fold: bool = True) -> State:
        state = self.step.state(self.table, fold=fold and not plan.names_blocks, hooks=plan.hooks)
        state.made["strict"] = self.strict
        state.mesh, state.plan = mesh, plan
        self._note(state)
        return state

    def _note(self, state: State) -> None:
        """Keep what a dump is written of."""
        if self.table.keep_texts:
            self.latest = state

    def _placed(self, state: State, mesh: Mesh, plan: Plan) -> State:
        """The state of a graph that is to be compiled for this mesh with this plan."""
        state.graph.mesh = state.mesh = mesh
        state.plan = plan
        return state

    def _staged(self, state: State, plan: Plan) -> State:
        """For several stages: the plan that says where they begin, and a graph of those that stand
        for all. Unfolded if a folded graph cannot be cut there.
        """
        graph, mesh = state.graph, state.mesh
        if not graph.folds or not is_pipeline(plan, mesh):
            return state
        full = staged_plan(state).plan
        if not full.stages:
            return self._placed(state, mesh, plan)
        kept = run(state, "keep_stages").made["kept"]
        if kept is None:
            raise Unfolded(full.stages[0])
        again = self.step.state(self.table, kept=kept, hooks=plan.hooks)
        again.made = {**state.made, **again.made}
        again.graph.rows = graph.rows
        self._note(again)
        staged = plan.changed(schedule=full.schedule, stages=full.stages)
        return self._placed(again, mesh, staged)


def _nothing_to_choose(objective: str, plan: Plan) -> PlanError:
    return PlanError(
        where=f"objective {objective!r}",
        what=f"the plan {plan.preset!r} leaves nothing to choose",
        why='an objective is what plan="auto" searches for',
        do='Take plan="auto", or leave the objective out.',
    )
