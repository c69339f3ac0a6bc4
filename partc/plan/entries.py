"""Read a table of a plan whose entries are the fields of a class, such as ``[compress]``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from partc.errors import PlanError
from partc.wrong_calls import did_you_mean

SMALLEST_BLOCK, LARGEST_BLOCK = 8, 65_536
Flaw = Callable[[Any], str]  # what is wrong with what is given for an entry; "" if nothing is


@dataclass(frozen=True)
class Entries:
    """The entries of one table.

    ``flaws``: by entry, in order. ``example``: what to write at least. ``lacking``: what a table
    that lacks its first entry does not say. ``words``: of entries that are one of several.
    ``told``: what other tools call an entry, and what to write here.
    """

    name: str
    made: type
    flaws: Mapping[str, Flaw]
    example: str
    lacking: str
    words: Mapping[str, Iterable[str]] = field(default_factory=dict)
    told: Mapping[str, str] = field(default_factory=dict)

    @property
    def first(self) -> str:
        """The entry that every such table has."""
        return next(iter(self.flaws))

    def read(self, table: Mapping[str, Any], where: str) -> Any:
        """The table as an object of its class; PlanError for an unknown or wrong entry."""
        for name, given in table.items():
            if name not in self.flaws:
                do = self._instead(name, table)
                why = f"entries are {', '.join(self.flaws)}"
                raise self.wrong(where, f"there is no entry {name!r}", why, do)
            if why := self.flaws[name](given):
                do = self._meant(name, given) or self._usual(name)
                raise self.wrong(where, f"{name} = {given!r} means nothing", why, do)
        if self.first not in table:
            raise self.wrong(where, self.lacking, self.flaws[self.first](None))
        return self.made(**table)

    def _instead(self, name: str, table: Mapping[str, Any]) -> str:
        """What to write for an unknown entry; "" where the table has none of those it needs."""
        if said := self.told.get(name.lower()) or did_you_mean(name, self.flaws):
            return said
        return "Take one of these, or leave it out." if self.first in table else ""

    def wrong(self, where: str, what: str, why: str, do: str = "") -> PlanError:
        """The refusal of a table."""
        do = do or (
            f"Write [{self.name}], and below it {self.example}; docs/reference/plan.md has all "
            "entries."
        )
        return PlanError(where=f"{where}, {self.name}", what=what, why=why, do=do)

    def _meant(self, name: str, given: Any) -> str:
        """What somebody may have meant: a number in quotation marks, a word next to one."""
        if isinstance(given, float) and given.is_integer() and not self.flaws[name](int(given)):
            return f"Write it as a whole number: {name} = {int(given)}."
        if not isinstance(given, str):
            return ""
        number = number_in(given)
        if number is not None and not self.flaws[name](number):
            return f"Write {name} = {number}, without quotation marks."
        return did_you_mean(given, self.words.get(name, ()))

    def _usual(self, name: str) -> str:
        """What to write for an entry that means nothing; "" for one that has no usual value."""
        usual = {each.name: each.default for each in fields(self.made)}[name]
        text = str(usual).lower() if isinstance(usual, bool) else usual
        return "" if usual is MISSING else f"Leave it out for {name} = {text}, or write another."


def number_in(text: str) -> int | float | None:
    """The number that a text is, as somebody writes it in quotation marks; None for another text.

    >>> number_in("16"), number_in("0.5"), number_in("often")
    (16, 0.5, None)
    """
    plain = re.fullmatch(r"-?[0-9]{1,18}(\.[0-9]{1,18})?", text.strip(), re.ASCII)
    if plain is None:
        return None
    return float(text) if plain.group(1) else int(text)


def is_number(given: Any) -> bool:
    return isinstance(given, int | float) and not isinstance(given, bool)


def is_whole(given: Any) -> bool:
    return isinstance(given, int) and not isinstance(given, bool)


def of_steps(given: Any) -> str:
    return "" if is_whole(given) and 0 <= given < 1e12 else "it is a number of steps, from 0"


def of_flag(given: Any) -> str:
    return "" if isinstance(given, bool) else "it is true or false"


def is_block(given: Any) -> str:
    fits = is_whole(given) and SMALLEST_BLOCK <= given <= LARGEST_BLOCK
    fits = fits and given % SMALLEST_BLOCK == 0
    return "" if fits else f"it is a multiple of 8, from {SMALLEST_BLOCK} to {LARGEST_BLOCK:,}"
