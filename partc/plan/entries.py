"""Read a table of a plan whose entries are the fields of a class, such as ``[compress]``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from partc.errors import PlanError
from partc.wrong_calls import did_you_mean

Flaw = Callable[[Any], str]  # what is wrong with what is given for an entry; "" if nothing is


@dataclass(frozen=True)
class Entries:
    """The entries of one table.

    ``flaws``: by entry, in order. ``example``: what to write at least. ``lacking``: what a table
    that lacks its first entry does not say.
    """

    name: str
    made: type
    flaws: Mapping[str, Flaw]
    example: str
    lacking: str

    @property
    def first(self) -> str:
        """The entry that every such table has."""
        return next(iter(self.flaws))

    def read(self, table: Mapping[str, Any], where: str) -> Any:
        """The table as an object of its class; PlanError for an unknown or wrong entry."""
        for name, given in table.items():
            if name not in self.flaws:
                do = did_you_mean(name, self.flaws)
                why = f"entries are {', '.join(self.flaws)}"
                raise self.wrong(where, f"there is no entry {name!r}", why, do)
            if why := self.flaws[name](given):
                raise self.wrong(where, f"{name} = {given!r} means nothing", why, self._usual(name))
        if self.first not in table:
            raise self.wrong(where, self.lacking, self.flaws[self.first](None))
        return self.made(**table)

    def wrong(self, where: str, what: str, why: str, do: str = "") -> PlanError:
        """The refusal of a table."""
        do = do or (
            f"Write [{self.name}], and below it {self.example}; docs/reference/plan.md has all "
            "entries."
        )
        return PlanError(where=f"{where}, {self.name}", what=what, why=why, do=do)

    def _usual(self, name: str) -> str:
        """What to write for an entry that means nothing; "" for one that has no usual value."""
        usual = {each.name: each.default for each in fields(self.made)}[name]
        text = str(usual).lower() if isinstance(usual, bool) else usual
        return "" if usual is MISSING else f"Leave it out for {name} = {text}, or write another."


def is_number(given: Any) -> bool:
    return isinstance(given, int | float) and not isinstance(given, bool)


def is_whole(given: Any) -> bool:
    return isinstance(given, int) and not isinstance(given, bool)


def of_steps(given: Any) -> str:
    return "" if is_whole(given) and 0 <= given < 1e12 else "it is a number of steps"


def of_flag(given: Any) -> str:
    return "" if isinstance(given, bool) else "it is true or false"
