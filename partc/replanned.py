"""``partc.replan``: a program for more or fewer ranks, with the global batch as it was."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from math import isfinite
from typing import cast

from partc.carried_plan import bare, carried
from partc.data.share import rows_per_step
from partc.errors import PartcError, UsageError
from partc.lowering import table
from partc.passes.runner import run
from partc.plan import Plan
from partc.plan.mesh import Mesh, MeshLike
from partc.plan.other_world import World
from partc.program import Program
from partc.program.recipes import recipe_of
from partc.program.tensors.holders import Holders
from partc.recipe import Recipe
from partc.traced import Traced
from partc.wrong_calls import check_whole_number, known_arguments, quoted

MOST_NAMED = 3  # parameters that a note names


@known_arguments
def replan(program: Program, mesh: int | MeshLike) -> Program:
    """The program for another number of ranks: the same model, global batch and microbatches.

    What the plan decided stays where it can: its preset, and what somebody wrote into it. What was
    chosen for the old ranks is chosen anew. Checkpoints of the old program load into the new one.

    Args:
        program: what ``compile`` gave, or ``partc.with_model(partc.load(folder), model, loss)``.
        mesh: the number of ranks, for which data axes change first; or sizes of the program's axes,
            as ``"dp=3"``.

    Returns:
        The program; the first of its plan's notes says what has changed.

    Raises:
        UsageError: so many ranks cannot share the global batch; it says how many can.
        PlanError: the plan has an own entry that the new sizes do not divide; or its machines
            cannot have so many devices.
        RunError: the program was loaded, and has no model.

    Example::

        program = partc.with_model(partc.load("build"), model, loss_of)
        partc.replan(program, 3).save("build-3")
    """
    if not isinstance(program, Program):
        raise UsageError(
            where="replan", what=f"the program is {quoted(program)}",
            why="another one is made of it", do="Pass what compile gave, or "
            "partc.with_model(partc.load(folder), model, loss).",
        )  # fmt: skip
    recipe, plan = cast(Recipe, recipe_of(program)), Plan.parse(program.plan)
    _check_unedited(program)
    to = _other_mesh(program, plan, mesh)
    with recipe.as_wanted(program.wanted.mode, program):
        step = recipe.step_of(program)
        shapes = {name: shard.shape for name, shard in Holders.of(program).shards.items()}
        kept = carried(plan, _usual(step, plan, program.mesh), program.mesh, to, shapes)
        notes = (_told(program, plan, to, kept.dropped),)
        made = recipe.compile(step, _with_machines(program, to), kept.plan.changed(notes=notes))
    made = replace(
        made, made_for=program.wanted, recipe=recipe, hooks=program.hooks, target=program.target
    )
    others = tuple(recipe.program(other.wanted, made) for other in program.others)
    return replace(made, others=others)


def _check_unedited(program: Program) -> None:
    """UsageError for a program whose text somebody has changed: what is compiled has not that."""
    printed = program.fixed.sources if program.fixed else {}
    edited = [n for n, text in program.sources.items() if printed.get(n, text) != text]
    if edited:
        raise UsageError(
            where="replan", what=f"{edited[0]} was edited",
            why="what is compiled anew has no edits",
            do="Compile for the other ranks by partc.compile, and edit that; functions of hooks.py "
            "are taken over.",
        )  # fmt: skip


def _other_mesh(program: Program, plan: Plan, mesh: int | MeshLike) -> Mesh:
    """The axes of the new program."""
    shapes = {name: shape for name, (shape, _) in program.inputs.items()}
    world = World(program.mesh, plan, shapes)
    _check_number(mesh)
    if isinstance(mesh, int):
        num = check_whole_number(mesh, "replan(mesh)", 1)
        return world.of_ranks(num, f"replan({num})")
    return world.with_axes(Mesh.of(mesh), f"replan({quoted(mesh)})")


def _check_number(given: object) -> None:
    """UsageError for what is meant for a number of ranks, and is none: ``"4"``, ``2.0``, None."""
    is_text = isinstance(given, str) and given.strip().isdecimal()
    if not is_text and not isinstance(given, float | bool | None):
        return
    counts = isinstance(given, str | float) and isfinite(float(given))
    number = int(float(given)) if counts else 0  # type: ignore[arg-type]
    do = f"Write replan(program, {number})." if number > 0 else "Write replan(program, 2)."
    raise UsageError(
        where="replan(mesh)", what=f"{quoted(given)} is no number of ranks",
        why="it is a whole number, or has sizes of the program's axes as text", do=do,
    )  # fmt: skip


def _with_machines(program: Program, mesh: Mesh) -> Mesh:
    """The mesh with the machines of the old program, as many as there are ranks."""
    if not program.basis.machine or (known := program.basis.topology()).name == "cpu":
        return mesh
    return Mesh(mesh.axes, known.resized(mesh.num_ranks))


def _usual(step: Traced, plan: Plan, mesh: Mesh) -> Plan | None:
    """What the preset alone says on a mesh; None without a preset, or where it needs more."""
    if not plan.preset:
        return None
    with suppress(PartcError):
        state = step.state(table(left_out=plan.left_out), fold=True, hooks=plan.hooks)
        state.graph.mesh, state.mesh, state.plan = mesh, mesh, bare(plan)
        run(state, "find_batch")
        return run(state, "place_on_mesh", "complete").plan
    return None


def _told(program: Program, plan: Plan, to: Mesh, dropped: tuple[str, ...]) -> str:
    """The sentence on what has changed."""
    rows = ""
    with suppress(UsageError):  # inputs that do not tell how many rows they have
        rows = f", {rows_per_step(plan, program.inputs)} rows"
    turns = f" in {plan.microbatches} microbatches" if plan.microbatches > 1 else ""
    told = f"replanned from {program.mesh} for {to}: a step has the same global batch{rows}{turns}"
    if dropped:
        more = f" and {len(dropped) - MOST_NAMED} more" if len(dropped) > MOST_NAMED else ""
        told += f"; left to the preset: {', '.join(dropped[:MOST_NAMED])}{more}"
    return told
