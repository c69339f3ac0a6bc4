"""Variants of a training step: the same gradients over the same weights by other plans.

In: a program, and the plans of its variants by name. Out: the program with a further program for
each, which differs in how and what ranks send.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from partc.errors import PlanError, UsageError
from partc.plan import Plan
from partc.plan.mesh import ISLAND
from partc.plan.wires import is_residual
from partc.program import Program
from partc.program.recipes import recipe_of
from partc.program.role import Shard
from partc.program.wanted import is_name
from partc.wrong_calls import known_arguments, quoted

FIRST = "compiled"  # the variant that the program itself is


@known_arguments
def with_variants(program: Program, **plans: str | Path | Plan) -> Program:
    """A program with variants of its step: the same gradients, sent by other plans.

    A ``Controller`` chooses between them from step to step. They are for the batch that the program
    was compiled for; batches of other shapes run by its own plan. ``program.save`` saves them.

    Args:
        program: what ``compile`` gave. Its own plan is the variant ``compiled``. It has to be the
            one that keeps most: a variant may read the errors that a compressed sum keeps only if
            this program has them.
        plans: each variant's plan by its name: a preset, the text or path of a plan.toml, a Plan.

    Raises:
        PlanError: a variant stores a tensor otherwise than the program, or keeps one that the
            program does not have; the program has pipeline stages or islands.
        UsageError: a name that no variant may have.
        RunError: the program was loaded, and has no model to compile.

    Example::

        program = partc.with_variants(program, exact="ddp", int8=int8_plan)
    """
    if not isinstance(program, Program):
        raise UsageError(
            where="with_variants", what=f"the program is {quoted(program)}",
            why="variants are those of a compiled program",
            do="Pass partc.with_variants(program, name=plan).",
        )  # fmt: skip
    recipe, others = recipe_of(program), {each.wanted: each for each in program.others}
    _check_whole(program)
    for name, plan in plans.items():
        wanted = replace(program.wanted, variant=_checked(name))
        if wanted in others:
            raise _wrong(name, "there is a variant of this name", "a name says which one is meant")
        made = recipe.variant(wanted, plan, program)
        _check_whole(made)
        _check_meaning(name, made, program)
        _check_stored(name, made, program)
        others[wanted] = made
    return replace(program, others=tuple(others.values()))


def variants_of(program: Program) -> dict[str, Program]:
    """The program and its variants by name, the program itself first."""
    named = {each.wanted.variant: each for each in program.others if each.wanted.variant}
    return {FIRST: program, **named}


def _checked(name: str) -> str:
    """UsageError for a name that no variant may have."""
    if name == FIRST:
        raise _wrong(name, "no variant may be called so", "this is the program itself")
    if not is_name(name):
        why = "a name begins with a letter, and has at most 64 letters, figures, _ and -"
        raise _wrong(name, "no variant may be called so", why)
    return name


def _wrong(name: object, what: str, why: str) -> UsageError:
    do = "Name it otherwise: partc.with_variants(program, int8=plan)."
    return UsageError(where=f"the variant {quoted(name)}", what=what, why=why, do=do)


def _check_whole(program: Program) -> None:
    """PlanError for a program with stages or microbatches, or islands, apart between steps."""
    kinds = {
        "islands": dict(program.mesh.axes).get(ISLAND, 1) > 1,
        "pipeline stages": program.mesh.pipeline_ranks > 1,
        "microbatches": Plan.parse(program.plan).microbatches > 1,
    }
    for kind, has in kinds.items():
        if has:
            raise PlanError(
                where="with_variants", what=f"the program has {kind}",
                why="what a variant saves is predicted for a step of one stage and one microbatch",
                do="Compile variants for a mesh of dp, tp and alike, and one microbatch.",
            )  # fmt: skip


def _check_meaning(name: str, variant: Program, first: Program) -> None:
    """PlanError where gradients are directions in one of both, and numbers in the other."""
    plans = [Plan.parse(each.plan).compress for each in (variant, first)]
    mine, others = (how is not None and how.is_direction for how in plans)
    if mine != others:
        raise PlanError(
            where=f"the variant {name}",
            what=f"gradients are {'directions' if mine else 'numbers'}, and in the program "
            f"{'directions, +1 and -1' if others else 'numbers'}",
            why="an optimizer takes other steps by them, so that it needs another learning rate",
            do="Take variants that agree in it: of [compress] the same wire.",
        )  # fmt: skip


def _check_stored(name: str, variant: Program, first: Program) -> None:
    """PlanError unless ranks hold each tensor of a variant as they hold it for the program."""
    for rank in range(first.mesh.num_ranks):
        if rank and variant.role_of(rank) == variant.role_of(rank - 1):
            continue
        held = {s.name: _stored(s) for s in first.role(rank).shards}
        for shard in variant.role(rank).shards:
            is_constant = shard.name in variant.constants
            if not is_constant and held.get(shard.name) != _stored(shard):
                raise _stored_otherwise(name, shard)


def _stored(shard: Shard) -> tuple[Any, ...]:
    return shard.shape, shard.dtype, shard.cuts


def _stored_otherwise(name: str, shard: Shard) -> PlanError:
    what = f"{shard.name} is stored otherwise than by the program"
    do = "Take a plan that stores parameters alike, such as another [compress] or bucket_mb."
    if is_residual(shard.name):
        what = f"it keeps {shard.name}, which the program does not have"
        do = "Compile this plan first, with variants of others; or write error_feedback = false."
    why = "all variants of a step share the memory of its tensors"
    return PlanError(where=f"the variant {name}", what=what, why=why, do=do)
