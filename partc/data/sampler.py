"""The sampler of one rank: the rows of each of its steps."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

from torch.utils.data import BatchSampler, Sampler

from partc.data.course import Course, Position
from partc.data.order import Order, Row, Span
from partc.data.same_rows import note
from partc.data.share import Share
from partc.errors import UsageError


class RowSampler(Sampler[list[int]]):
    """The rows of the dataset that one rank reads in each step: a DataLoader's ``batch_sampler``.

    Every iteration is an epoch: the first begins at the position, each later one with the next
    epoch, also where the one before was left early. ``len`` is the number of steps of the epoch.

    Attributes:
        order: the order of all ranks' rows.
        share: which of them this rank reads.
        course: where this sampler stands.
    """

    def __init__(self, order: Order, share: Share, seed: int = 0, *, dataset: Any = None) -> None:
        """``dataset``: where ranks compare which rows they are dealt."""
        self._dataset = dataset
        same = {"num_rows": order.num_rows, "shuffle": order.shuffle}
        self.order, self.share, self.course = order, share, Course(seed, same)

    def __len__(self) -> int:
        return self.order.num_steps(self.position)

    def __iter__(self) -> Iterator[list[int]]:
        self._check_reader(sys._getframe(1))
        return self._steps()

    def _steps(self) -> Iterator[list[int]]:
        if self._dataset is not None and self.share.world > 1:
            note(self._dataset, self.share.world, self.order, self.position)
        iteration = self.begin()
        for span in self.spans():
            self.course.take(*span, iteration)
            yield [row.row for row in self.rows(span)]
        self.end(iteration)

    def _check_reader(self, reader: FrameType) -> None:
        """UsageError where torch makes batches of what are batches: ``DataLoader(sampler=...)``."""
        if reader.f_code is BatchSampler.__iter__.__code__:
            size = reader.f_locals["self"].batch_size
            raise UsageError(
                where=f"DataLoader(sampler=program.sampler(dataset), batch_size={size})",
                what=f"each batch would be {size} batches",
                why="program.sampler gives the rows of a whole step at once, "
                f"{len(self.share.places)} of this rank",
                do="Write DataLoader(dataset, batch_sampler=program.sampler(dataset)); how many "
                "rows a step has say program.sampler(dataset, rows_per_step=...) and the batch "
                "that was compiled.",
            )  # fmt: skip

    @property
    def position(self) -> Position:
        """The place of the next step; equal on all ranks."""
        return self.course.position

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be this epoch; what was loaded inside of the epoch stays."""
        self.course.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position behind the last step that was given out: plain values, all ranks' alike."""
        return self.course.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind that step, under any mesh and rows per step.

        LoadError if the state is of another dataset or order.
        """
        self.course.load_state_dict(state)

    def rows(self, span: Span) -> list[Row]:
        """This rank's rows of a step."""
        return self.order.rows(span, self.share)

    # for the loader, which moves the position when the script takes a batch ------------------
    def begin(self) -> int:
        """Begin an iteration; UsageError where its last step would leave a rank without rows."""
        if next(self.spans(), None) is None:  # all of the epoch was taken, but for its end
            self.course.end_open(self.order.carried(self.position))
        iteration = self.course.begin()
        left = (self.order.num_rows - self.position.index) % self.order.per_step
        if self.order.last == "partial" and 0 < left < self.share.world:
            refuse_empty_piece(left, self.share)
        return iteration

    def spans(self) -> Iterator[Span]:
        """The steps from the position on."""
        return self.order.spans(self.position)

    def end(self, iteration: int) -> None:
        """End an iteration, when its epoch has."""
        self.course.end(iteration, self.order.carried(self.position))


def refuse_empty_piece(num: int, share: Share) -> None:
    """UsageError: the last rows of an epoch are fewer than the data ranks."""
    raise UsageError(
        where='last="partial"',
        what=f"the last step of the epoch has {num} rows for {share.world} data ranks",
        why="a rank without a row has no batch to compute",
        do='Pass last="drop" or last="next", or another number of rows per step.',
    )
