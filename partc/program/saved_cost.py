"""The predicted cost of a program, as it was compiled or as it was saved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from partc.cost.cost_html import cost_html
from partc.errors import LoadError, PartcError, UsageError


class Cost(Protocol):
    """The predicted cost of a program: ``str`` is a table, ``as_json`` the numbers."""

    def as_json(self) -> Any: ...


class SeveralNumbers:
    """A cost, which is no number: it says which ones it has."""

    def __float__(self) -> NoReturn:
        raise UsageError(
            where="float(program.cost)", what="a cost is no number",
            why="it has seconds, bytes and FLOPs",
            do='Take one of program.cost.as_json(): ["prediction"]["seconds"].',
        )  # fmt: skip

    def as_json(self) -> Any:
        """The numbers as plain data."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        return cost_html(self.as_json())


@dataclass(frozen=True)
class SavedCost(SeveralNumbers):
    """A cost as it was printed when the program was compiled."""

    text: str = ""
    data: Any = None

    def __str__(self) -> str:
        return self.text

    def as_json(self) -> Any:
        return self.data


@contextmanager
def saved_numbers(folder: str) -> Iterator[None]:
    """Inside, what is computed from a saved program's predictions; LoadError where these are
    malformed, which is found only when they are computed with.
    """
    try:
        yield
    except PartcError:
        raise
    except (
        TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError,
    ) as error:  # fmt: skip
        raise LoadError(
            where=f"{folder}, program.json",
            what="its predictions cannot be computed with",
            why=repr(error),
            do="Compile the program again. If nobody has changed the file, this is a fault in "
            "partc: report it with this message.",
        ) from error
