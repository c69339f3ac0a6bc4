"""Where a run stands in its rows: moved by what the script takes, saved and loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from partc.errors import LoadError
from partc.wrong_calls import check_whole_number, quoted


@dataclass(frozen=True)
class Position:
    """Where a run stands in its rows; the same on all ranks, whatever their number.

    ``index`` counts the rows that all ranks together have taken of the epoch. It is below zero
    where rows of the epoch before are still to be taken.
    """

    seed: int
    epoch: int = 0
    index: int = 0

    def at(self, index: int) -> Position:
        """Another place of the same epoch."""
        return Position(self.seed, self.epoch, index)


FIELDS = "seed", "epoch", "index"


class Course:
    """The position of a sampler or loader over iterations, of which each is an epoch.

    The first iteration begins at the position, each later one with the next epoch, also where the
    one before was left early. Only the iteration that began last moves the position.

    Attributes:
        position: the place of the next step.
        same: what has to be equal where a state is loaded, by name.
    """

    def __init__(self, seed: int, same: Mapping[str, Any]) -> None:
        whole = check_whole_number(seed, "seed", -(2**63))
        self.position, self.same = Position(whole), same
        self._iteration = 0
        self._is_open = False  # whether an iteration has begun, and not ended

    def begin(self) -> int:
        """Begin an iteration; its number."""
        if self._is_open:
            self.position = Position(self.position.seed, self.position.epoch + 1)
        self._is_open, self._iteration = True, self._iteration + 1
        return self._iteration

    def take(self, start: Position, num: int, iteration: int) -> None:
        """Move behind the ``num`` rows from ``start`` on, which an iteration hands out."""
        if iteration == self._iteration:
            self.position = start.at(start.index + num)

    def end(self, iteration: int, index: int = 0) -> None:
        """Move to the next epoch; ``index`` is below zero where it begins with rows of this one."""
        if iteration == self._iteration:
            self.end_open(index)

    def end_open(self, index: int = 0) -> None:
        """The same for the iteration that began last, if it has not ended."""
        if self._is_open:
            self.position = Position(self.position.seed, self.position.epoch + 1, index)
            self._is_open = False

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be an epoch from its first row, as DistributedSampler does.

        A position inside of this epoch that was loaded, or where an iteration ended, stays.
        """
        check_whole_number(epoch, "set_epoch")
        if self._is_open or epoch != self.position.epoch:
            self.position = Position(self.position.seed, epoch)
        self._is_open = False

    def state_dict(self) -> dict[str, Any]:
        """The position, and what has to be equal where it is loaded: plain values."""
        return {**asdict(self.position), **self.same}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a position that was saved.

        LoadError if the state is none of partc's, or where its rows would be others.
        """
        known = state if isinstance(state, Mapping) else {}
        numbers = [known.get(name) for name in FIELDS]
        if not all(type(number) is int for number in numbers):
            has = ", ".join(map(str, known)) or "nothing"
            raise LoadError(
                where="load_state_dict",
                what="the state has no position in the rows of a dataset",
                why=f"it {f'has {has}' if known is state else f'is {quoted(state)}'}; a position "
                f"is {', '.join(FIELDS)}",
                do="Load what state_dict() of a loader or sampler of partc gave.",
            )
        for name in (name for name in {**self.same, **state} if name not in FIELDS):
            self._check_same(name, state.get(name), self.same.get(name))
        self.position, self._is_open = Position(*numbers), False  # type: ignore[arg-type]

    def _check_same(self, name: str, saved: Any, here: Any) -> None:
        if saved != here:
            raise LoadError(
                where="load_state_dict",
                what=f"the position was saved with {name}={saved}, here it is {here}",
                why="other rows would follow: some would come twice and some never",
                do=f"Resume with {name}={saved}; or leave the position out (no loader= in "
                "load_checkpoint), and begin an epoch: set_epoch(...).",
            )
