"""The programs of one loss by the form of what a script calls it with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from partc.errors import RunError
from partc.program.choices import MOST_PROGRAMS
from partc.trace.arguments import Arguments


@dataclass
class Forms:
    """What steps by one loss, with the arguments that each takes.

    A model may be called as ``model(x)`` while data are collected, and as ``model(x, action)``
    while it trains. Each has a program of its own, over the same weights.
    """

    known: list[tuple[Any, Arguments]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.known)

    def stepping(self, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """What takes these arguments; None if nothing does."""
        return next((each for each, taken in self.known if taken.take(args, named)), None)

    def refusing(self, form: Arguments | None) -> Any:
        """What says why it does not take arguments of a form, None of what the loss does not take.

        None where they may be meant: then they have a program of their own. Where numbers alone
        differ they are not, as a program has them in its text.
        """
        if not self.known or form is None:
            return self.known[0][0] if self.known else None
        same = next((each for each, taken in self.known if taken.form == form), None)
        meant = any(taken.form.may_be(form) for _, taken in self.known)
        return same or (None if meant else self.known[0][0])

    def check_room(self) -> None:
        """RunError where a stage may have no further program."""
        if len(self.known) == MOST_PROGRAMS:
            raise _too_many()

    def add(self, stepping: Any, taken: Arguments) -> Any:
        """Know one more."""
        self.known.append((stepping, taken))
        return stepping


def _too_many() -> RunError:
    return RunError(
        where="a call of the model",
        what=f"it was called with {MOST_PROGRAMS} forms of arguments already",
        why="each form (what is given, what is None or left out) has a program of its own, which "
        "takes seconds to compile",
        do="Make what differs a tensor.",
    )  # fmt: skip
