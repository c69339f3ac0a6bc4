"""Compare an edited text with the printed one on numbers that the step on one device has not seen.

Small seeded numbers leave much of a step alone: bounds that they do not reach, what an inference
does other, large numbers and such as are none. Both texts run on all of these, and must agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from partc.audit.bounds import Bound, Bounds, Moved, Seen
from partc.audit.changed_lines import Changes, Place
from partc.audit.numbers import TIMEOUT_S, differences
from partc.audit.run_text import Numbers, Outcome, Run
from partc.errors import CheckError, PartcError
from partc.program import Program
from partc.program.expected import Expected
from partc.program.fixed_text import FixedText
from partc.verification.threads import run_ranks

SEEDED = Numbers()
OTHERS = (
    Numbers("where numbers are 30 times as large, in eval mode", factor=30.0, trains=False),
    Numbers("where numbers are NaN or infinite", spoiled=True),
)


def check_other_numbers(
    program: Program, expected: Expected, changes: Changes
) -> tuple[str, list[str]]:
    """What was compared, and what could not be; CheckError where the edited text differs."""
    printed = replace(program, sources=(program.fixed or FixedText()).sources)
    pair = _Pair(printed, program, expected, changes)
    for file, line in sorted(changes.conditions):
        raise CheckError(
            where=f"{file}:{line}",
            what="the edit decides by a condition",
            why="what it does where the condition is another one is seen by no run of the check",
            do="Undo the edit, or compute both and choose with torch.where.",
        )
    for others in OTHERS:
        pair.compare(others, Moved())
    first = pair.compare(SEEDED, Moved())
    assert first is not None
    seen, edited = first
    moved = seen.moved()
    for ours, theirs in [*pair.moves(moved, seen)]:
        seen.add(ours)
        edited.add(theirs)
    open_ones = pair.check_idle(seen, edited)
    num = len(moved.bounds) + len(moved.turned)
    told = f"edits: {changes}; printed and edited text agree on large numbers, NaN, in eval mode, "
    return f"{told}and where {num} bounds are moved to where the numbers are", open_ones


@dataclass(frozen=True)
class _Pair:
    """A text as it was printed and as it is now."""

    printed: Program
    edited: Program
    expected: Expected
    changes: Changes

    def compare(self, numbers: Numbers, moved: Moved) -> tuple[Seen, Seen] | None:
        """What runs of both found of bounds; None if the printed text does not take the numbers.

        CheckError if they give other numbers.
        """
        try:
            ours, seen = self._run(self.printed, numbers, moved)
        except (PartcError, RuntimeError):
            return None
        if not (numbers.spoiled or all(map(_is_finite, ours))) and moved != Moved():
            return None
        theirs, edited = self._run(self.edited, numbers, moved)
        for off in differences(theirs, ours):
            raise CheckError(
                where=str(self.changes) or ", ".join(self.edited.sources),
                what=f"the edited text computes other numbers than the printed one {_said(moved)}"
                f"{numbers.said}",
                why=off,
                do="Undo the edit.",
            )
        return seen, edited

    def _run(
        self, program: Program, numbers: Numbers, moved: Moved
    ) -> tuple[Sequence[Outcome], Seen]:
        run, seen = Run(program, self.expected, numbers), Seen()

        def rank(rank: int, dist: Any) -> tuple[Outcome, Seen]:
            mode = Bounds(moved)
            return run.once(rank, dist, mode), mode.seen

        found = run_ranks(program.mesh.num_ranks, rank, timeout=TIMEOUT_S)
        for _, of_rank in found:
            seen.add(of_rank)
        return [outcome for outcome, _ in found], seen

    def moves(self, moved: Moved, seen: Seen) -> Iterator[tuple[Seen, Seen]]:
        """Runs with all moves at once, or with each alone where those give no finite numbers.

        Moves of one bound can hide those of another, so those of edited lines are made alone too.
        """
        alone = {bound for place, bound in seen.idle() if place in self.changes.printed}
        yield from filter(None, (self.compare(SEEDED, m) for m in moved.within(alone).single()))
        for part in (Moved(moved.bounds), Moved(turned=moved.turned)):
            if part == Moved():
                continue
            whole = self.compare(SEEDED, part)
            rest = part.single() if whole is None else ()
            yield from filter(None, [whole, *(self.compare(SEEDED, each) for each in rest)])

    def check_idle(self, seen: Seen, edited: Seen) -> list[str]:
        """What is not known of edits elsewhere; CheckError if an edited line has an idle bound."""
        for place, bound in sorted(edited.idle()):
            if place in self.changes.now:
                raise _idle(place, bound, "the edit")
        open_ones = sorted(seen.idle())
        for place, bound in open_ones:
            if place in self.changes.printed:
                raise _idle(place, bound, "the printed line")
        return [
            f"what the edits do where {_text(bound)} (line {line} of {file} as printed) makes a "
            "difference, as no number of the check got there"
            for (file, line), bound in open_ones
        ]


def _is_finite(outcome: Outcome) -> bool:
    return all(bool(x.isfinite().all()) for x in outcome.tensors().values())


def _said(moved: Moved) -> str:
    """Where bounds were moved, for a message."""
    named = [_text(bound) for bound in (*moved.bounds, *sorted(moved.turned))]
    if not named:
        return ""
    told = ", ".join(named[:3]) + f" and {len(named) - 3} more" * (len(named) > 3)
    return f"where numbers reach {told}"


def _text(bound: Bound) -> str:
    """A bound in words: ``max_val=6 of hardtanh``, ``gt 5``, ``eq``."""
    op, argument, numbers = bound
    word = op.split(".")[1]
    if not argument:
        return " ".join([word, *(f"{x:g}" for x in numbers)])
    return f"{argument}={numbers[0]:g} of {word}"


def _idle(place: Place, bound: Bound, whose: str) -> CheckError:
    return CheckError(
        where=f"{place[0]}:{place[1]}",
        what=f"no number of the check reaches {_text(bound)}, which {whose} has",
        why="whether it is right shows only where a number does",
        do="Undo the edit: such a line has to stand as partc printed it.",
    )
