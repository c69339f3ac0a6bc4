"""Loaders of iterable datasets, whose rows have no numbers.

``StreamLoader``: every rank reads the same stream and keeps its rows, so it resumes anywhere.
``OwnStreamLoader``: each data rank has a stream of its own, which resumes in the same place alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, default_collate, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from partc.data.course import Course, Position
from partc.data.digest import digest_of
from partc.data.failed_rows import naming_failures
from partc.data.loader import Loader, as_it_is, check_options
from partc.data.order import Last, Span, check_last
from partc.data.sampler import refuse_empty_piece
from partc.data.seeds import Generators, seed_of, seed_process
from partc.data.share import Share
from partc.data.wrapped import Wrapped
from partc.errors import RunError, UsageError
from partc.users_line import warn

Collate = Callable[[list[Any]], Any]


class StreamLoader(Loader):
    """A loader of a stream that is the same on all ranks, of which each rank keeps its rows.

    It resumes under any mesh and any workers, by reading again what was taken before. The stream's
    random numbers follow from seed and epoch. The ranks compare the first row of each iteration,
    so that they have to iterate together.
    """

    def __init__(
        self,
        dataset: Any,
        share: Share,
        device: torch.device,
        *,
        seed: int = 0,
        last: Last = "drop",
        collate_fn: Collate | None = None,
        **options: Any,
    ) -> None:
        """Read ``dataset``; ``options`` are those of torch's DataLoader."""
        _check_stream_options(options, last)
        self.course, self.share, self.last, self.device = Course(seed, {}), share, last, device
        self.batches = _Batches(dataset, share, last, collate_fn or default_collate)
        super().__init__(
            self.batches, batch_size=None, collate_fn=as_it_is, generator=torch.Generator(),
            **options,
        )  # fmt: skip
        self.show_batch_size(share)

    def __len__(self) -> int:
        """The number of steps; UsageError, which is a TypeError, for a stream without a length."""
        check_length(self.batches._inside)
        whole, rest = divmod(len(self.batches), self.share.per_step)
        return whole + (self.last == "partial" and rest > 0)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        iteration = self.course.begin()
        self.batches.begin(self.position)
        return self._taken(iteration, naming_failures(super().__iter__, self.dataset))

    def _taken(self, iteration: int, batches: Iterator[tuple[Span, bytes, Any]]) -> Iterator[Any]:
        number, whole = -1, self.position.index <= 0
        for number, (span, digest, batch) in enumerate(batches):
            if number == 0:
                check_same_stream(digest, self.device)
            if span.num < self.share.world:
                refuse_empty_piece(span.num, self.share)
            self.course.take(*span, iteration)
            yield batch
        if number < 0 and whole:
            _warn_of_no_step(self.dataset, self.share.per_step)
        self.course.end(iteration)


class OwnStreamLoader(Loader):
    """A loader of a stream that gives the rows of this data rank alone.

    Ranks may have different numbers of rows: before each step they agree whether all have one
    more, so they iterate together. It resumes on as many data ranks and workers as it was saved
    with, by reading again what was taken before.
    """

    def __init__(
        self,
        dataset: Any,
        share: Share,
        device: torch.device,
        *,
        seed: int = 0,
        last: Last = "drop",
        **options: Any,
    ) -> None:
        """Read ``dataset``; ``options`` are those of torch's DataLoader."""
        _check_stream_options(options, last)
        if last != "drop":
            _refuse_last(last, "the ranks' streams may end at different steps")
        same = {
            "data_world": share.world, "num_workers": options.get("num_workers", 0),
            "rows_per_step": share.per_step,
        }  # fmt: skip
        self.course, self.share = Course(seed, same), share
        self.is_alone = not dist.is_initialized() or dist.get_world_size() == 1
        on_gpu = device.type == "cuda" and not self.is_alone
        self.group = dist.new_group(backend="gloo") if on_gpu else None  # no wait for the device
        super().__init__(
            dataset, batch_size=len(share.places), drop_last=True, generator=torch.Generator(),
            **options,
        )  # fmt: skip

    def __len__(self) -> int:
        check_length(self.dataset)
        return super().__len__()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        iteration, start = self.course.begin(), self.position
        set_epoch(self.dataset, start.epoch)
        seed = seed_of("stream", start.seed, start.epoch, self.share.rank) % 2**62
        assert self.generator is not None
        self.generator.manual_seed(seed)  # of the workers: alike on ranks of one piece
        aside: Callable[[], AbstractContextManager[None]] = nullcontext
        aside = aside if self.num_workers else Generators(seed).used
        with aside():
            batches = naming_failures(super().__iter__, self.dataset)
        return self._taken(iteration, start, batches, aside)

    def _taken(
        self,
        iteration: int,
        start: Position,
        batches: Iterator[Any],
        aside: Callable[[], AbstractContextManager[None]],
    ) -> Iterator[Any]:
        taken = start.index // self.share.per_step
        with aside():
            batch = next(islice(batches, taken, None), None)
        while self._all_have(batch):
            self.course.take(start, (taken + 1) * self.share.per_step - start.index, iteration)
            yield batch
            taken += 1
            with aside():
                batch = next(batches, None)
        if taken == 0:
            _warn_of_no_step(self.dataset, self.share.per_step)
        self.course.end(iteration)

    def _all_have(self, batch: Any) -> bool:
        """Whether every rank has one more batch."""
        has = torch.tensor(int(batch is not None))
        if not self.is_alone:
            dist.all_reduce(has, dist.ReduceOp.MIN, group=self.group)
        return bool(has)


class _Batches(Wrapped, IterableDataset[Any]):
    """One rank's batches of a stream, each with its span and a digest; it runs in the workers.

    Every worker reads the whole stream, and makes every n-th batch.
    """

    _start: Position

    def __init__(self, dataset: Any, share: Share, last: Last, collate: Collate) -> None:
        self._inside, self._share, self._last, self._collate = dataset, share, last, collate

    def begin(self, start: Position) -> None:
        """Let the next iteration begin at a position; the dataset is told the epoch."""
        self._start = start
        set_epoch(self._inside, start.epoch)

    def __iter__(self) -> Iterator[tuple[Span, bytes, Any]]:
        info = get_worker_info()
        number, num = (info.id, info.num_workers) if info else (0, 1)
        seed = seed_of("stream", self._start.seed, self._start.epoch)
        aside = Generators(seed).used if info is None else nullcontext
        if info is not None:
            seed_process(seed)
        for count, (span, rows) in enumerate(self._steps(aside)):
            if count % num == number:
                mine = [rows[place] for place in self._share.of(span.num).tolist()]
                with aside():
                    batch = self._collate(mine) if mine else None
                yield span, digest_of(rows[0]) if count == 0 else b"", batch

    def _steps(
        self, aside: Callable[[], AbstractContextManager[None]]
    ) -> Iterator[tuple[Span, list[Any]]]:
        """The rows of all ranks, step by step, from the position on."""
        with aside(), _no_worker():
            stream = iter(self._inside)
        stream = islice(_drawn(stream, aside), self._start.index, None)
        at = self._start
        while rows := list(islice(stream, self._share.per_step)):
            if len(rows) < self._share.per_step and self._last == "drop":
                return
            yield Span(at, len(rows)), rows
            at = at.at(at.index + len(rows))


class NoLengthError(UsageError, TypeError):
    """A stream was asked how long it is; a TypeError, which ``list(loader)`` passes over."""


def check_length(dataset: Any) -> None:
    """NoLengthError for a stream that does not say how many rows it has."""
    if not hasattr(dataset, "__len__"):
        raise NoLengthError(
            where="len(loader)", what=f"the {type(dataset).__name__} has no length",
            why="an iterable dataset is read to its end, and nothing says before where that is",
            do="Give it __len__, its rows of an epoch; or count steps in the loop, and tell a "
            "scheduler or a bar how many there are to be.",
        )  # fmt: skip


def _warn_of_no_step(dataset: Any, per_step: int) -> None:
    """Tell that an epoch of a stream has no step, as its length is known at its end alone."""
    of = getattr(dataset, "_inside", dataset)
    warn(
        f"partc: the {type(of).__name__} gave no step in this epoch, as a step takes "
        f"{per_step} rows of all data ranks. Look at what reads it, or take fewer rows in a step: "
        "rows_per_step=..."
    )  # fmt: skip


def _drawn(
    stream: Iterator[Any], aside: Callable[[], AbstractContextManager[None]]
) -> Iterator[Any]:
    """The rows of a stream, read with generators of their own."""
    end = object()
    while True:
        with aside(), _no_worker():
            row = next(stream, end)
        if row is end:
            return
        yield row


@contextmanager
def _no_worker() -> Iterator[None]:
    """Let a stream that splits itself among workers give all its rows: ours split its steps."""
    info, torch_worker._worker_info = torch_worker._worker_info, None
    try:
        yield
    finally:
        torch_worker._worker_info = info


def check_same_stream(digest: bytes, device: torch.device) -> None:
    """RunError on all ranks if the streams of two ranks begin with different rows."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    mine = torch.tensor(list(digest), dtype=torch.uint8, device=device)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    told = [bytes(each.tolist()) for each in found]
    others = [str(rank) for rank, each in enumerate(told) if each != told[0]]
    if others:
        raise RunError(
            where="loader of an iterable dataset",
            what=f"its first row on rank 0 is another one than on rank {', '.join(others)}",
            why="each rank keeps its rows of one stream, which has to be the same everywhere",
            do="Let the dataset give all rows in one order, on every rank; or, if it gives only "
            'the rows of program.data_rank(rank) of program.data_world, pass split="own".',
        )


def set_epoch(dataset: Any, epoch: int) -> None:
    """Tell a dataset that shuffles by the epoch which one it is."""
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)


def _check_stream_options(options: dict[str, Any], last: Last) -> None:
    check_options(options)
    check_last(last)
    if last == "next":
        _refuse_last(last, "where a stream ends is not known ahead")
    if options.get("persistent_workers"):
        raise UsageError(
            where="loader(persistent_workers=True)",
            what="workers of an iterable dataset end with the epoch",
            why="each begins at the position",
            do="Leave it out.",
        )


def _refuse_last(last: Last, why: str) -> None:
    raise UsageError(
        where=f"loader(last={last!r})",
        what="an iterable dataset cannot end an epoch so",
        why=why,
        do='Pass last="drop", or let the dataset repeat itself.',
    )
