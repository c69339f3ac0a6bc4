"""Compile more programs of a model by what compiled the first one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from partc.errors import RunError, UsageError
from partc.plan import Plan
from partc.program.step.autocast import DEVICES, autocast_now, without
from partc.program.step.batch_fit import Pieces, Rows
from partc.program.wanted import Recipe, Wanted
from partc.trace.arguments import spread

if TYPE_CHECKING:
    from partc.program import Program

WANTED = {"train": ("step", "train"), "eval": ("loss", "eval"), "forward": ("forward", "eval")}


def recipe_of(program: Program) -> Recipe:
    """What compiled a program; RunError if it was loaded from a folder."""
    if program.recipe is None:
        raise RunError(
            where=f"the program of {program.model}",
            what="no further program can be compiled",
            why="it was loaded, and the model is not at hand",
            do="Give it the model: partc.with_model(program, model, loss).",
        )
    return program.recipe


def with_others(program: Program, batches: Sequence[Any], modes: Sequence[str]) -> Program:
    """The program with one more for each of these batches in each of these modes.

    A batch whose rows data ranks cannot share is computed whole by every rank. An autocast that is
    open is that of the calls.
    """
    autocast = autocast_now(*DEVICES)
    with without(autocast):
        return _with_others(program, batches, modes, autocast)


def _with_others(
    program: Program, batches: Sequence[Any], modes: Sequence[str], autocast: str
) -> Program:
    from partc.program.stage.calls_of_stage import Calls

    recipe, others = recipe_of(program), {each.wanted: each for each in program.others}
    calls, pieces = Calls(program, others.values), Pieces.of(program)
    forward = program.forward_batch.layouts
    rows = Rows.of(Plan.parse(program.plan), program.mesh, program.inputs, forward)
    _check_modes(modes)
    _check_batches(program, batches, modes)
    for mode in modes:
        kind, its_mode = WANTED[mode]
        if mode == "train":
            its_mode = program.wanted.mode
        for batch in batches:
            args, named = spread(batch)
            inputs, form = calls.tensors(kind, args, named)  # type: ignore[arg-type]
            asked = Wanted.of(kind, its_mode, inputs, form)  # type: ignore[arg-type]
            wanted = pieces.whole(replace(asked, autocast=autocast))
            if rows.uneven(wanted):
                wanted = replace(wanted, replicated=True)
            if wanted != program.wanted and wanted not in others:
                others[wanted] = recipe.program(wanted, program)
    return replace(program, others=tuple(others.values()))


def _check_modes(modes: Sequence[str]) -> None:
    """UsageError for modes that there are not, and for a text in the place of a list."""
    unknown = next((mode for mode in modes if mode not in WANTED), None)
    if isinstance(modes, str) and modes in WANTED:
        what, do = "it is one text", f"Pass a tuple: modes=({modes!r},)."
    elif unknown is not None:
        what, do = "there is no such mode", "Take some of these."
    else:
        return
    raise UsageError(
        where=f"for_shapes(modes={modes!r})", what=what, why=f"there are {', '.join(WANTED)}", do=do
    )


def _check_batches(program: Program, batches: Sequence[Any], modes: Sequence[str]) -> None:
    """UsageError for tensors in the place of batches of several inputs."""
    names = ", ".join(each.name for each in program.arguments.each)
    several = len(program.arguments.each) > 1 and {*modes} != {"forward"}
    if several and any(isinstance(batch, Tensor) for batch in batches):
        raise UsageError(
            where="for_shapes", what="a batch is a tensor", why=f"a step takes ({names})",
            do=f"Pass a tuple for each batch: for_shapes(({names}), ...).",
        )  # fmt: skip
