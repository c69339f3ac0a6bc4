"""The texts of a program by the names of their files; a wrong name lists those that there are."""

from __future__ import annotations

from typing import NoReturn

from partc.errors import UsageError
from partc.wrong_calls import did_you_mean, quoted


class NoSourceError(UsageError, KeyError):
    """A program was asked for a file that it has not got."""

    __str__ = Exception.__str__  # a KeyError's would show the sentence in quotation marks


class Sources(dict[str, str]):
    """The text of each file, by its name."""

    def __missing__(self, name: object) -> NoReturn:
        near = did_you_mean(name, self)
        do = "program.source(rank) gives the text that a rank runs."
        raise NoSourceError(
            where=f"program.sources[{quoted(name)}]", what="the program has no such file",
            why=f"it has {', '.join(self)}", do=f"{near} {do}".strip(),
        )  # fmt: skip
