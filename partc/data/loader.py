"""DataLoaders of one rank, which read ahead and know what the script has taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import astuple
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate, get_worker_info

from partc.data.course import Course, Position
from partc.data.failed_rows import naming_failures
from partc.data.order import Row, Span
from partc.data.sampler import RowSampler
from partc.data.seeds import Generators, seed_of, seed_process
from partc.data.share import Share
from partc.data.wrapped import Wrapped
from partc.errors import UsageError

OURS = ("batch_size", "sampler", "batch_sampler", "drop_last", "generator", "in_order")


class Loader(DataLoader[Any]):
    """A torch DataLoader of one rank's batches, with a position equal on all ranks.

    The position is that of the batches which the script has taken, whatever was read ahead.
    """

    course: Course

    def show_batch_size(self, share: Share) -> None:
        """Let scripts read how many rows a batch has; torch takes whole batches for its items."""
        self.__dict__["batch_size"] = len(share.places)

    @property
    def position(self) -> Position:
        """The place of the next batch that the script takes."""
        return self.course.position

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be this epoch; what was loaded inside of the epoch stays."""
        self.course.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position behind the last batch that the script has taken: plain values."""
        return self.course.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind that batch; LoadError where other rows would follow."""
        self.course.load_state_dict(state)


class RowLoader(Loader):
    """A loader of a dataset's rows by number: it resumes under any mesh and any workers.

    A sample's random numbers (of the global generators of torch, numpy and Python) follow from
    the seed, the epoch and the sample's place in the epoch; what ``collate_fn`` draws, from the
    place of the rank's first row. So neither workers nor ranks change a sample.

    ``sampler.set_epoch`` is as DistributedSampler's. ``dataset`` stands for the dataset, with its
    length and its public names. ``batch_size`` is the number of this rank's rows in a step.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        rows: RowSampler,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        seed_samples: bool = True,
        **options: Any,
    ) -> None:
        """Read ``dataset``; ``options`` are those of torch's DataLoader.

        UsageError for options that the sampler decides.
        """
        check_options(options)
        self.rows, self.course, self._source = rows, rows.course, dataset
        super().__init__(
            _Batches(dataset, rows, collate_fn or default_collate, seed_samples),
            batch_size=None,
            sampler=_Spans(rows),
            collate_fn=as_it_is,
            generator=torch.Generator(),  # else each epoch would draw from the script's numbers
            **options,
        )
        self.show_batch_size(rows.share)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._check_size()
        iteration, spans = self.rows.begin(), self.rows.spans()
        batches = naming_failures(super().__iter__, self.dataset)
        return self._taken(iteration, spans, batches)

    def _check_size(self) -> None:
        """UsageError if the dataset has other rows than when the loader was made."""
        num, before = len(self._source), self.rows.order.num_rows  # type: ignore[arg-type]
        if num != before:
            raise UsageError(
                where="loader", what=f"the dataset had {before} rows, and has {num}",
                why="the order of all ranks' rows was made for as many as there were",
                do="Call stage.loader(dataset, ...) again, on all ranks, behind what changes them.",
            )  # fmt: skip

    def _taken(
        self, iteration: int, spans: Iterator[Span], batches: Iterator[Any]
    ) -> Iterator[Any]:
        """The batches; the position moves when the script takes one."""
        for span, batch in zip(spans, batches, strict=True):
            self.course.take(*span, iteration)
            yield batch
        self.rows.end(iteration)


def check_options(options: Mapping[str, Any]) -> None:
    """UsageError for options of a DataLoader that the plan or the sampler decides."""
    wrong = sorted({*options} & {*OURS})
    if wrong:
        raise UsageError(
            where=f"loader({wrong[0]}=...)",
            what="this option of a DataLoader is decided by the program's sampler",
            why="which rows a rank reads, and how many, follows from the plan",
            do="Leave it out: rows_per_step, last, shuffle and seed say the rest. With a sampler "
            "of your own take torch's DataLoader, program.data_rank(rank) and program.data_world.",
        )


def as_it_is(batch: Any) -> Any:
    """A batch that the dataset has made already."""
    return batch


class _Spans(Sampler[Span]):
    """The steps that workers are asked for, ahead of the script."""

    def __init__(self, rows: RowSampler) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Span]:
        return self.rows.spans()

    def __len__(self) -> int:
        return len(self.rows)

    def set_epoch(self, epoch: int) -> None:
        self.rows.set_epoch(epoch)


class _Batches(Wrapped, Dataset[Any]):
    """A dataset whose items are one rank's whole batches, by the step; it runs in the workers."""

    def __init__(
        self,
        dataset: Dataset[Any],
        rows: RowSampler,
        collate: Callable[[list[Any]], Any],
        seed_samples: bool,
    ) -> None:
        self._inside, self._rows, self._collate = dataset, rows, collate
        self._seed_samples, self._aside = seed_samples, Generators()

    def __getitem__(self, span: Span) -> Any:
        rows = self._rows.rows(span)
        if not self._seed_samples:
            return self._joined(_read_together(self._inside, [row.row for row in rows]))
        # without workers this is the script's own process
        with nullcontext() if get_worker_info() else self._aside.used():
            items = [self._sample(row) for row in rows]
            # by the first row of the piece, so that ranks with one piece draw alike
            seed_process(seed_of("collate", *astuple(rows[0].place)))
            return self._joined(items)

    def _joined(self, items: list[Any]) -> Any:
        """A batch of rows; UsageError where torch's default makes none of them."""
        if self._collate is not default_collate:
            batch = self._collate(items)
            if batch is None:
                raise UsageError(
                    where="loader(collate_fn=...)", what="it returns None",
                    why="what it returns is the batch",
                    do="Let it return the tensors of the batch.",
                )  # fmt: skip
            return batch
        try:
            return default_collate(items)
        except (RuntimeError, TypeError) as error:
            raise UsageError(
                where=f"loader, {type(self._inside).__name__}",
                what="its rows make no batch", why=str(error).partition("\n")[0],
                do="Give rows of one shape and form, or pass collate_fn=, which fills them up.",
            ) from None  # fmt: skip

    def _sample(self, row: Row) -> Any:
        seed_process(seed_of("sample", *astuple(row.place)))
        return self._inside[row.row]


def _read_together(dataset: Any, rows: list[int]) -> list[Any]:
    """Rows of a dataset; datasets that read many at once (Hugging Face's) do so."""
    if hasattr(dataset, "__getitems__"):
        items: list[Any] = dataset.__getitems__(rows)
        return items
    return [dataset[row] for row in rows]
