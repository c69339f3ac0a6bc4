"""The predicted cost of a program, as it was compiled or as it was saved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


class Cost(Protocol):
    """The predicted cost of a program: ``str`` is a table, ``as_json`` the numbers."""

    def as_json(self) -> Any: ...


@dataclass(frozen=True)
class SavedCost:
    """A cost as it was printed when the program was compiled."""

    text: str = ""
    data: Any = None

    def __str__(self) -> str:
        return self.text

    def as_json(self) -> Any:
        return self.data
