"""Labels that are no input: a list of numbers, or a tensor that the loss reads from outside.

They are part of a program, one rank's as they were when it was compiled, so that no step of all
ranks' rows fits them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from partc.errors import PartcError, PlanError
from partc.trace.arguments import Given
from partc.trace.closed_over import OUTSIDE


@dataclass(frozen=True)
class FixedRows:
    """One value with as many rows as the inputs, where it is, and what to do about it."""

    where: str
    what: str
    do: str

    def refusal(self, error: PartcError) -> PlanError:
        """The refusal of a step that fails on all ranks' rows with this error."""
        return PlanError(
            where=self.where, what=f"{self.what}, which become part of the program",
            why="a step has the rows of all ranks, and these stay one rank's: "
            + str(error).partition("\n")[0],
            do=self.do,
        )  # fmt: skip


def fixed_rows(given: Given, frozen: Iterable[str]) -> FixedRows | None:
    """The first such value; ``frozen``: sentences on what a step reads from outside."""
    rows = {x.shape[0] for x in given.tensors if x.dim()}
    found = (*_lists(given, rows), *_outside(frozen, rows))
    return next(iter(found), None)


def _lists(given: Given, rows: set[int]) -> Iterator[FixedRows]:
    for name, each in given.bound.arguments.items():
        if isinstance(each, list | tuple) and len(each) in rows and all(map(_is_number, each)):
            yield FixedRows(
                f"input {name}", f"it is a {type(each).__name__} of {len(each)} numbers",
                f"Pass a tensor: torch.as_tensor({name}).",
            )  # fmt: skip


def _outside(frozen: Iterable[str], rows: set[int]) -> Iterator[FixedRows]:
    for text in (each.removeprefix(OUTSIDE) for each in frozen if each.startswith(OUTSIDE)):
        name, _, rest = text.partition(", ")
        size = re.match(r"\w+\[(\d+)", rest)
        if size and int(size[1]) in rows:
            line = rest.partition("read at ")[2]
            yield FixedRows(
                f"{name} ({line})" if line else name,
                f"the loss reads {size[1]} rows from outside of its inputs",
                "Make it an input: an argument of the loss, def loss_of(model, x, y), that is "
                "passed beside the others, inputs=(x, y).",
            )  # fmt: skip


def _is_number(each: Any) -> bool:
    return isinstance(each, int | float)
