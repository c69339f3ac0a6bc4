"""The batch that the ranks of a stage have in common: the longest, filled up, whole or dropped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from partc.plan import Plan
from partc.program import Program
from partc.program.choices import Choices
from partc.program.model.habits import tell_first
from partc.program.ranks.disagreement import refused_elsewhere
from partc.program.stage.family_errors import (
    CALL,
    REFUSED,
    calls_differ,
    not_ignored,
    ranks_differ,
)
from partc.program.stage.unlike_batches import (
    OF_ISLANDS,
    OF_ONE_BATCH,
    OF_OWN_ROWS,
    of_lengths,
    of_microbatches,
    of_other_calls,
)
from partc.program.step.batch_fit import Pieces, Rows, longest, uneven_error
from partc.program.step.uneven_rows import UnevenRows
from partc.program.wanted import Wanted


class CommonBatch:
    """Which batch ranks have in common, by what each of them wants and by the user's choices.

    ``programs`` are those of the stage, as they become more. ``in_turns``: an island computes its
    rows in as many microbatches as it has been given.
    """

    def __init__(
        self, first: Program, programs: Mapping[Wanted, Program], choices: Choices, *,
        in_turns: bool,
    ) -> None:  # fmt: skip
        self._first, self._programs, self._choices = first, programs, choices
        self._in_turns = in_turns
        plan, forward = Plan.parse(first.plan), first.forward_batch.layouts
        self._rows = Rows.of(plan, first.mesh, first.inputs, forward)
        self.pieces, self.uneven = Pieces.of(first), UnevenRows.of(first)

    def agreed(self, wanted: Wanted, texts: Sequence[str]) -> Wanted:
        """What all ranks run; where their lengths differ the longest, if they may be filled up.

        ``texts``: what every rank wants, if they differ.

        RunError on every rank, with what each has, if ranks differ in more.
        """
        if not texts:
            return wanted
        if any(text.startswith(CALL) for text in texts):
            raise calls_differ(texts)
        if REFUSED in texts:
            raise refused_elsewhere([i for i, text in enumerate(texts) if text == REFUSED])
        each = [Wanted.parse(text) for text in texts]
        found = longest(each, self._rows)
        if found is None or not self._may_fill(each, found):
            mine = [self.pieces.mine(one) for one in each]
            raise ranks_differ(mine, self._what_helps(each))
        return found

    def _what_helps(self, each: Sequence[Wanted]) -> str:
        """What to do where ranks want other batches."""
        plan, first = Plan.parse(self._first.plan), self._first
        if found := of_other_calls(each):
            return found
        if len({tuple(self._rows.sizes(one)) for one in each}) == 1:
            return of_lengths(each, first.inputs)
        if plan.uneven is not None:
            return of_microbatches(plan.uneven.of_each)
        joined = self.uneven is not None and self.uneven.whole(each) is not None
        if first.mesh.islands > 1 and not joined:
            return OF_ISLANDS
        return OF_OWN_ROWS if self.pieces.of_each else OF_ONE_BATCH

    def together(self, texts: Sequence[str]) -> Wanted | None:
        """The whole batch where ranks have different numbers of its rows, and may gather it."""
        if not texts or REFUSED in texts or self._choices.partial != "replicate":
            return None
        if self._in_turns or any(text.startswith(CALL) for text in texts):
            return None
        each = [Wanted.parse(text) for text in texts]
        return self.uneven.whole(each) if self.uneven is not None else None

    def may_differ(self, wanted: Wanted) -> bool:
        """Whether the batch has as many inputs as the first one, of the same dtypes."""
        first = self._first.wanted.inputs
        return [dtype for _, dtype in wanted.inputs] == [dtype for _, dtype in first]

    def values(self, wanted: Wanted) -> list[float | None]:
        """The number with which each input is filled up; of a forward, whose inputs have names of
        their own, and whose result would be longer, none.
        """
        if wanted.kind == "forward":
            return [None] * len(wanted.inputs)
        names = list(self._first.inputs)
        names += [""] * (len(wanted.inputs) - len(names))
        return [self._choices.pad.get(name) for name, _ in zip(names, wanted.inputs, strict=False)]

    def even(self, wanted: Wanted) -> Wanted | None:
        """The same batch as data ranks can compute it; None if it is to be dropped."""
        uneven = self._rows.uneven(wanted)
        if not uneven:
            return wanted
        alone = replace(wanted, replicated=True)
        if all(rows == 1 for rows, _ in uneven) or alone in self._programs:
            return alone
        turns = self._in_turns and wanted.kind == "step"
        if self._choices.partial is None or (turns and self._choices.partial != "drop"):
            raise uneven_error(wanted, uneven, self._first.inputs, in_turns=turns)
        if self._choices.partial == "replicate":
            return alone
        if self._choices.partial == "pad" and wanted.kind == "forward":
            return alone  # results of more rows are not what the model returns
        if self._choices.partial == "drop":
            tell_first("partc leaves out %s: %d rows for %d data ranks", wanted, *uneven[0])
            return None
        return self._filled(wanted)

    def _filled(self, wanted: Wanted) -> Wanted:
        """The batch with more rows, which the loss has been shown to ignore."""
        to = self._rows.filled(wanted)
        values = self.values(to)
        changed = [i for i, one in enumerate(wanted.inputs) if one != to.inputs[i]]
        without = [name for i, name in enumerate(self._first.inputs) if i in changed]
        without = [name for name in without if name not in self._choices.pad]
        why = f"pad has no number for {', '.join(without)}"
        if all(values[i] is not None for i in changed):
            why = self._why_not(wanted, to)
        if why:
            raise not_ignored(wanted, why, self._first.inputs if without else {})
        return to

    def _may_fill(self, each: Sequence[Wanted], to: Wanted) -> bool:
        """Whether ``pad`` names every input that is filled up on some rank."""
        values = self.values(to)
        return all(
            value is not None or len({one.inputs[i] for one in each}) == 1
            for i, value in enumerate(values)
        )

    def _why_not(self, wanted: Wanted, to: Wanted) -> str:
        recipe = self._first.recipe
        if recipe is None:
            return "the model is not at hand to try it"
        return recipe.ignores(wanted, to, self._first, self.values(to))
