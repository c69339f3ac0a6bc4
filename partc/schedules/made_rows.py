"""What the function of a named schedule gives: a row of actions for each rank, or what is wrong.

Rows of partc's own schedules are held by tests. Those of a user are looked at whenever they are
made, and a message names the function, and how it was called.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NoReturn

from partc.errors import PartcError, PlanError
from partc.schedules.actions import Action, Schedule, check_schedule
from partc.schedules.named import Needs
from partc.schedules.timing import Costs, timeline
from partc.users_line import failed_at
from partc.wrong_calls import quoted

Rows = tuple[tuple[Action, ...], ...]
ROWS = "a schedule is a list with one row of actions for each rank"


@dataclass(frozen=True)
class Call:
    """A call of a schedule's function."""

    name: str
    needs: Needs
    ranks: int
    microbatches: int
    chunks: int

    @property
    def told(self) -> str:
        """The call as messages tell it: many functions have these in another order."""
        return (
            f"{self.needs.function} is called with (ranks, microbatches, chunks), here "
            f"({self.ranks}, {self.microbatches}, {self.chunks})"
        )

    def schedule(self) -> Schedule:
        """What the function makes; PlanError for what is no schedule of these ranks."""
        rank_of = self.needs.rank_of(self.ranks, self.chunks)
        made = Schedule(self.name, self._rows(), rank_of, self.microbatches)
        if not self.needs.of_partc:
            self._check(made)
        return made

    def _rows(self) -> Rows:
        rows = self._whole_rows(self._given())
        each = [one for row in rows for one in row]
        if wrong := [one for one in each if not _is_action(one)]:
            shown = f"{wrong[0]}" if isinstance(wrong[0], Action) else quoted(wrong[0])
            why = "a row has partc.schedules.actions.Action of stage, kind and microbatch"
            self._refuse(
                f"{shown} is no action", why, 'Write Action(0, "F", 2), or Action.parse("0F2").'
            )
        parts = [one for one in each if one.kind in ("I", "W")]
        if parts and not self.needs.split:
            self._refuse(
                f"{parts[0]} is a part of a backward", "the schedule does not say that it splits "
                "backwards", f"Write @schedule({self.name!r}, split=True), or B for the whole "
                "backward.",
            )  # fmt: skip
        return rows

    def _given(self) -> list[Any]:
        """The rows, whatever they are."""
        try:
            given = self.needs.orders(self.ranks, self.microbatches, self.chunks)
            if isinstance(given, Iterable):
                return list(given)
        except PartcError:
            raise
        except Exception as error:
            what = f"the function failed: {failed_at(error, self.needs.orders)}"
            do = "Mend it: it gives a row of actions for each rank."
            raise PlanError(where=self._at, what=what, why=self.told, do=do) from error
        self._refuse(f"it gives {quoted(given)}", ROWS, "Return the rows: return rows.")

    def _whole_rows(self, given: list[Any]) -> Rows:
        for number, row in enumerate(given):
            if isinstance(row, str | Action) or not isinstance(row, Iterable):
                alone = isinstance(row, Action)
                self._refuse(
                    f"row {number} is {f'the action {row}' if alone else quoted(row)}, and no row",
                    ROWS, "Add each row as a whole: rows.append(row), and not rows.extend(row)."
                    if alone else "Give a tuple of actions for each rank, for example "
                    'numbered([(0, "F"), (0, "B")]) of partc.schedules.blocks.',
                )  # fmt: skip
        if len(given) != self.ranks:
            what = f"it gives {_counted(len(given), 'row')} for {_counted(self.ranks, 'rank')}"
            self._refuse(what, self.told, "Give one row of actions for each rank.")
        return tuple(map(tuple, given))

    def _check(self, made: Schedule) -> None:
        """PlanError unless every action is there once, on its rank, and the order finishes."""
        try:
            check_schedule(made)
            timeline(made, Costs.even(made.stages))
        except PlanError as error:
            why = f"{error.why}; {self.told}" if error.why else self.told
            raise PlanError(where=error.where, what=error.what, why=why, do=error.do) from None

    def _refuse(self, what: str, why: str, do: str) -> NoReturn:
        raise PlanError(where=self._at, what=what, why=why, do=do)

    @property
    def _at(self) -> str:
        return f"schedule={self.name!r}, {self.needs.function}"


def _counted(num: int, what: str) -> str:
    return f"{num} {what}" + ("" if num == 1 else "s")


def _is_action(given: object) -> bool:
    return (
        isinstance(given, Action)
        and given.kind in ("F", "B", "I", "W")
        and all(isinstance(n, Integral) and n >= 0 for n in (given.stage, given.microbatch))
    )
