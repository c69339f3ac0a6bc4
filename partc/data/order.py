"""The rows of each step of a run, from three integers: seed, epoch, and place in the epoch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from partc.data.course import Position
from partc.data.share import Share
from partc.data.shuffle import shuffled
from partc.errors import UsageError
from partc.wrong_calls import is_word, quoted

Last = Literal["drop", "partial", "next"]


class Span(NamedTuple):
    """The rows of one step, of all ranks together: ``num`` from a position on."""

    start: Position
    num: int


class Row(NamedTuple):
    """A row of the dataset, and the place in the run that it was taken for."""

    row: int
    place: Position


@dataclass(frozen=True)
class Order:
    """The order of a dataset's rows over steps and epochs.

    Attributes:
        num_rows: the size of the dataset.
        per_step: the rows of a step, of all data ranks together.
        shuffle: whether each epoch has an order of its own, or all that of the dataset.
        last: what becomes of rows that fill no step at the end of an epoch: they are left out
            (``"drop"``), are a smaller step (``"partial"``), or begin the next epoch
            (``"next"``).
    """

    num_rows: int
    per_step: int
    shuffle: bool = True
    last: Last = "drop"

    def __post_init__(self) -> None:
        check_last(self.last)
        if self.num_rows < 1:
            raise UsageError(
                where="a dataset of 0 rows", what="it has no rows",
                why="an epoch would have no step",
                do="Look at what reads or filters it: the folder, the split, the condition.",
            )  # fmt: skip
        if self.last == "drop" and self.num_rows < self.per_step:
            raise UsageError(
                where=f"a dataset of {self.num_rows} rows",
                what=f"it does not fill one step of {self.per_step} rows",
                why=f'last="{self.last}": an epoch would have no step',
                do=f"Compile for a step of at most {self.num_rows} rows; or pass "
                'last="next", whose steps go on into the next epoch. last="partial" gives fewer '
                'rows, which a stage takes that was made by program.module(partial="replicate").',
            )

    def spans(self, start: Position) -> Iterator[Span]:
        """The steps from a position to the end of its epoch."""
        for begin in range(start.index, self.num_rows, self.per_step):
            num = min(self.per_step, self.num_rows - begin)
            if num == self.per_step or self.last == "partial":
                yield Span(start.at(begin), num)

    def carried(self, at: Position) -> int:
        """The index at which the epoch after a position begins: below zero for rows left over."""
        left = (self.num_rows - at.index) % self.per_step
        return -left if self.last == "next" else 0

    def num_steps(self, at: Position) -> int:
        """The number of steps of an epoch, those before the position with those to come."""
        left = self.num_rows - at.index
        to_come = -(-left // self.per_step) if self.last == "partial" else left // self.per_step
        return -(-max(at.index, 0) // self.per_step) + to_come

    def rows(self, span: Span, share: Share) -> list[Row]:
        """The rows of one step that a rank reads."""
        start = span.start
        first = start.epoch * self.num_rows + start.index  # counted since the run began
        places = first + share.of(span.num)
        epochs, indices = np.divmod(places, self.num_rows)
        rows = self._rows(start.seed, epochs, indices)
        told = zip(rows.tolist(), epochs.tolist(), indices.tolist(), strict=True)
        return [Row(row, Position(start.seed, epoch, index)) for row, epoch, index in told]

    def _rows(
        self, seed: int, epochs: NDArray[np.int64], indices: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """The dataset's rows at places of epochs, i64[n] each."""
        if not self.shuffle:
            return indices
        rows = np.empty_like(indices)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            rows[here] = shuffled(indices[here], self.num_rows, seed, epoch)
        return rows


def check_last(last: str) -> None:
    """UsageError unless this is a word for the rows at an epoch's end."""
    if not is_word(last, get_args(Last)):
        raise UsageError(
            where=f"last={quoted(last)}",
            what="there is no such end of an epoch",
            why="",
            do=f"Give one of {', '.join(get_args(Last))}.",
        )
