"""What ``compile`` is given for a plan: a Plan, a preset's words, a text, or a path."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from partc.errors import PlanError, UsageError
from partc.idle_keys import idle_keys
from partc.key_readers import Compiled
from partc.passes.runner import State
from partc.passes.search.plans.choose_plan import AUTO_PLAN
from partc.passes.shard.idle_axes import IDLE
from partc.plan import Plan
from partc.plan.allowed import OWN_TABLES
from partc.plan.decided import NCCL
from partc.plan.field_kinds import OWN_ORDER, PLAIN, check_fields
from partc.plan.mesh import PP, Mesh
from partc.plan.ports.given import no_dict, no_json
from partc.plan.sharding import Layout
from partc.program import Program
from partc.program.model.habits import tell_first
from partc.program.ranks.group_backend import group_backend
from partc.trace.no_model import check_model
from partc.traced import Traced
from partc.users_line import warn
from partc.wrong_calls import quoted

LOG = logging.getLogger("partc")
OTHER_KINDS = (".json", ".yaml", ".yml")  # endings of other tools' files


def read_plan(plan: str | Path | Plan) -> Plan:
    """A Plan from a Plan, a preset's words, a plan's text or the path of a plan.toml."""
    if isinstance(plan, Plan):
        check_made(plan)
        return plan
    if not isinstance(plan, str | Path):
        raise _no_plan(plan)
    if isinstance(plan, Path) and plan.suffix in OTHER_KINDS:
        plan = str(plan)  # which no preset is called
    if isinstance(plan, Path) or plan.endswith(".toml"):
        return Plan.load(plan)
    if refusal := no_json(plan, "plan"):
        raise refusal
    if "\n" in plan or "=" in plan:
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


def _no_plan(given: object) -> PlanError:
    """The refusal of what is neither a text nor a Plan, with what to pass in its place."""
    do = 'Pass "auto", a preset such as "fsdp", a Plan, or the path of a plan.toml.'
    if isinstance(given, Program):
        do = "Pass its text: plan=program.plan."
    elif isinstance(given, Mapping):
        return no_dict(given)
    elif isinstance(given, int) and not isinstance(given, bool) and 0 <= given < 4:
        stage = ("ddp", "zero1", "zero2", "fsdp")[given]
        do = f"Write the preset for that stage of ZeRO: plan={stage!r}."
    elif isinstance(given, list | tuple) and given and all(isinstance(x, str) for x in given):
        do = f"Join presets by +: plan={'+'.join(given)!r}."
    elif type(given).__module__.startswith("torch.distributed"):
        do = (
            'Name the preset of partc: plan="fsdp" shards as FULL_SHARD, "zero2" as '
            'SHARD_GRAD_OP, "ddp" as NO_SHARD.'
        )
    return PlanError(where="compile", what=f"plan is {quoted(given)}", why="it is no plan", do=do)


def check_made(plan: Plan) -> None:
    """PlanError for a Plan whose fields have other types than those that a plan's text gives."""
    left_out = vars(Plan())
    said = {name: given for name, given in vars(plan).items() if given != left_out[name]}
    of_text = {*PLAIN, "gather", "scatter"}  # as they stand in a plan's text
    check_fields({name: given for name, given in said.items() if name in of_text}, "Plan")
    for name, table in OWN_TABLES.items():
        given = getattr(plan, name)
        if given is not None and not isinstance(given, table.made):
            raise PlanError(
                where="Plan(...)", what=f"{name} is {quoted(given)}",
                why="a plan in Python has partc's own types",
                do=f"Write {name}={table.example}, or a plan as text.",
            )  # fmt: skip
        if given is not None:
            usual = {each.name: each.default for each in fields(table.made)}
            said = {name: each for name, each in vars(given).items() if each != usual[name]}
            table.read(said, "Plan")
    for name, lies in plan.values.items() if isinstance(plan.values, Mapping) else ():
        if not isinstance(lies, Mapping):
            raise PlanError(
                where="Plan(...)", what=f"values[{name!r}] is {quoted(lies)}",
                why="a plan in Python has partc's own types",
                do="Write a plan.toml, or its text: partc.Plan.parse(text).",
            )  # fmt: skip
    tables = {"params": plan.params, "inputs": plan.inputs}
    wrong = [
        f"{table}[{name!r}] has {quoted(x)}, which is no Layout"
        for table, entries in tables.items() for name, cuts in entries.items()
        for x in _entries(cuts) if not isinstance(x, Layout)
    ]  # fmt: skip
    meshes = isinstance(plan.mesh, Mesh | None)
    if not meshes or wrong:
        what = wrong[0] if meshes else f"mesh is {quoted(plan.mesh)}"
        raise PlanError(
            where="Plan(...)", what=what, why="a plan in Python has partc's own types",
            do="Write a plan.toml, or its text: partc.Plan.parse(text). The mesh is an argument of "
            "compile.",
        )  # fmt: skip


def _entries(cuts: object) -> Iterable[object]:
    return cuts.values() if isinstance(cuts, Mapping) else [cuts]


def backend_at_hand(model: object, mesh: object) -> str:
    """What carries tensors between the ranks of a script that compiles on them: ``"gloo"`` or
    ``"nccl"``; "" where nothing tells, as on a machine that compiles for others.

    The device of the DeviceMesh, or of the model's weights, tells, and the default process group;
    of a model on ``meta`` the group alone.
    """
    module: Any = model.model if isinstance(model, Traced) else model
    check_model(module)
    known = getattr(mesh, "device_type", None)
    tensors = [*module.parameters(), *module.buffers()]
    kinds = [known] if known else list(dict.fromkeys(x.device.type for x in tensors))
    if "cuda" in kinds:
        return group_backend("cuda") or NCCL
    if kinds == ["meta"]:
        return group_backend("cpu") or group_backend("cuda") or ""
    return group_backend("cpu") or ""


def check_texts(name: str, given: object) -> None:
    """UsageError if an argument is no list of texts, such as a single text."""
    if not isinstance(given, list | tuple | set | frozenset):
        what = f"{name} is {quoted(given)}"
        do = f"Pass a list: {name}=[{quoted(given) if isinstance(given, str) else '...'}]."
        raise UsageError(where="compile", what=what, why="it is a list of texts", do=do)


def _cuts_something(plan: Plan) -> bool:
    """Whether a plan shards any tensor, or has nothing to shard over but pipeline stages."""
    axes = plan.mesh.cutting_axes().axes if plan.mesh else ()
    return (
        all(size == 1 for _, size in axes)
        or any(plan.params.values())
        or any(plan.inputs.values())
        or bool(plan.values)
    )


_UNFREEZE = "Unfreeze what is to be trained before compiling, model.requires_grad_(True)"
_REGISTER = (
    "Register layers in __init__, self.fc = nn.Linear(...), and lists of them as nn.ModuleList"
)
_FORWARD = "or compile the forward alone, under torch.no_grad() and without loss=."


def warn_of_idle(asked: Plan, state: State) -> None:
    """Warn of axes whose ranks all compute the same, and of keys of the plan that nothing reads."""
    made = state.plan
    for note in made.notes:
        if IDLE in note:
            warn(note)
    if made.mesh is not None and not made.preset and not _cuts_something(made):
        warn(
            f"the plan names no preset and cuts nothing over {made.mesh}, {IDLE}. Write "
            'preset = "ddp", or another.'
        )  # fmt: skip
    for text in idle_keys(Compiled(asked, state)):
        warn(text)


def warn_of_no_training(step: Traced) -> None:
    """Warn of a step that trains nothing: all of the model is frozen, or it has no parameter."""
    params = list(step.model.parameters())
    if getattr(step.loss, "inputs", ()):
        return  # what gets gradients are inputs, as of a critic that trains a generator
    if step.trains and not any(param.requires_grad for param in params):
        name, none = type(step.model).__name__, "" if params else ", as the model has none"
        warn(
            f"{name}: no parameter has requires_grad{none}, so that a step trains nothing. "
            + f"{_UNFREEZE if params else _REGISTER}; {_FORWARD}"
        )


def tell_of_one_microbatch(step: Traced, asked: Plan, mesh: Mesh) -> None:
    """Tell of a pipeline that nobody gave microbatches; a whole plan, which has stages, says so."""
    ranks = mesh.size(PP) if PP in mesh.names else 1
    if ranks > 1 and asked.microbatches == 1 and not asked.stages and step.trains:
        tell_first(
            "partc: the pipeline pp=%d has one microbatch, the whole batch, so that its ranks take "
            "turns and each of them waits for %d of %d parts of a step. Give it several, as "
            "microbatches=%d; microbatches=1 says that one is meant.",
            ranks, ranks - 1, ranks, 4 * ranks,
        )  # fmt: skip


def with_told(asked: Plan, found: Program) -> Program:
    """What a search found; a schedule that it was given is told of where there is no pipeline.

    ``auto`` asks for no pipeline: it says how one is to be made.
    """
    if asked.schedule not in ("", OWN_ORDER) and not found.schedule:
        LOG.warning(
            "schedule = %r says nothing here: the search took the mesh %s, without pipeline ranks, "
            "and one microbatch. For a pipeline name its ranks in the mesh, for example pp=2.",
            asked.schedule, found.mesh,
        )  # fmt: skip
    return found
