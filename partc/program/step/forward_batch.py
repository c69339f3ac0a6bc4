"""Which dim of each input of a forward is the batch, where the steps do not have it on dim 0 alone.

A step of a sequence-first model cuts ``x f32[35,20@dp]``. What ``stage(x)`` is given in eval mode
follows from the forward itself, with the step's cut as a first guess; a saved forward has it in its
plan. Where the batch of all of a step's inputs is dim 0, so it is in forwards. Where a step takes
one whole, as a mask over positions, a forward that has the same is looked at by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from partc.plan import Cuts, Plan
from partc.plan.batch import MODEL_AXES, layout_of
from partc.plan.sharding import Layout, R
from partc.program.wanted import Wanted

if TYPE_CHECKING:
    from partc.program import Program

Layouts = Sequence[Layout]
EXAMPLE = 4  # samples of a forward that is traced to see along which dim they lie


@dataclass
class ForwardBatch:
    """The cuts of a forward's inputs, by the first program of a stage and those saved with it."""

    first: Program
    known: dict[str, Layouts] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tables = _tables(self.first)
        cuts = {name: layout_of(table) for name, table in tables.items()}
        self.steps = {name: layout for name, layout in cuts.items() if layout != R}
        self.axes = (
            [a for a in tables[next(iter(self.steps))] if a not in MODEL_AXES] if self.steps else []
        )
        whole = [n for n, (shape, _) in self.first.inputs.items() if shape and n not in self.steps]
        alike = all(layout.dim == 0 for layout in self.steps.values())
        self.usual = alike and not (self.steps and whole)

    def layouts(self, wanted: Wanted) -> Layouts | None:
        """The cut of each input, R for a whole one; None where it is as it usually is.

        ``wanted``: a forward of all rows, or of some of them; how many changes nothing.
        """
        if self.usual or wanted.kind != "forward" or wanted.replicated:
            return None
        alike, same = f"{wanted.form} {_kinds(wanted)}", f"{wanted.form} {wanted.inputs}"
        found = self.known.get(alike) or self.known.get(same)
        if found is None:
            found = self._saved(wanted, _kinds) or self._traced(wanted)
            found = found or self._saved(wanted, _dims, blocks=True)
            if found is None:
                return None
            self.known[same if _has_blocks(found) else alike] = found
        return found

    def entries(self, names: Sequence[str], wanted: Wanted) -> dict[str, Cuts] | None:
        """The same as entries of ``[inputs]``."""
        found = self.layouts(wanted)
        if found is None:
            return None
        pairs = zip(names, found, strict=True)
        return {n: {} if lay == R else dict.fromkeys(self.axes, lay) for n, lay in pairs}

    def _saved(
        self, wanted: Wanted, seen: Callable[[Wanted], object], *, blocks: bool = False
    ) -> Layouts | None:
        """Those of a forward that the stage has for arguments that look alike.

        Not where they have blocks, as those of flat inputs, which another shape has otherwise;
        with ``blocks`` all the same, for what their dims tell.
        """
        for each in (self.first, *self.first.others):
            one = each.wanted
            alike = (one.kind, one.form) == (wanted.kind, wanted.form) and not one.replicated
            if alike and seen(one) == seen(wanted):
                found = [layout_of(table) for table in _tables(each).values()]
                if blocks or not _has_blocks(found) or one.inputs == wanted.inputs:
                    return found
        return None

    def _traced(self, wanted: Wanted) -> Layouts | None:
        recipe = self.first.recipe
        return recipe.batch_of(wanted, self.first, self.steps) if recipe else None


def guessed(names: Sequence[str], wanted: Wanted, steps: Mapping[str, Layout]) -> dict[str, Layout]:
    """The cuts of the step's inputs for a forward's inputs of the same names; without any that of
    the step's first input for the first one that has such a dim.
    """
    dims = {name: len(shape) for name, (shape, _) in zip(names, wanted.inputs, strict=True)}
    same = {n: each for n, each in steps.items() if n in dims and each.dim < dims[n]}
    plain = {n: each for n, each in same.items() if each.outer == 1}
    first = next(iter(steps.values()))
    other = next((name for name in names if dims[name] > first.dim), None)
    return plain or same or ({other: first} if other else {})


def example_of(names: Sequence[str], wanted: Wanted, guess: Mapping[str, Layout]) -> Wanted:
    """The forward with as many samples on every rank, by a guess of where these lie."""
    shapes = [list(shape) for shape, _ in wanted.inputs]
    for name, shape in zip(names, shapes, strict=True):
        if name in guess and guess[name].outer == 1:
            shape[guess[name].dim] = EXAMPLE
    pairs = zip(shapes, wanted.inputs, strict=True)
    return replace(wanted, inputs=tuple((tuple(shape), dtype) for shape, (_, dtype) in pairs))


def _tables(program: Program) -> dict[str, Cuts]:
    plan = Plan.parse(program.plan)
    return {name: plan.stored(name, plan.inputs) for name in program.inputs}


def _has_blocks(layouts: Layouts) -> bool:
    return any(each.outer > 1 for each in layouts)


def _dims(wanted: Wanted) -> list[int]:
    return [len(shape) for shape, _ in wanted.inputs]


def _kinds(wanted: Wanted) -> list[list[bool]]:
    """Which dims are of one element, as those of a mask for all samples."""
    return [[size == 1 for size in shape] for shape, _ in wanted.inputs]
