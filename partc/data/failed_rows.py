"""An error that a dataset or ``collate_fn`` of the user raises, named by where it arose."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from partc.errors import PartcError, RunError
from partc.users_line import failed_at

Batch = TypeVar("Batch")
# What a worker's error says: that of the worker, its traceback, and at the end what it raised.
_OF_WORKER = re.compile(r"Caught \w+ in (DataLoader worker process \d+)")
_LINE = re.compile(r'File "([^"]+)", line (\d+)')


def naming_failures(begin: Callable[[], Iterator[Batch]], dataset: object) -> Iterator[Batch]:
    """The batches of an iteration that ``begin`` starts, its workers too; RunError where the
    dataset, or what joins its rows, fails.
    """
    with _named(dataset):
        left = begin()
    return _batches(left, dataset)


def _batches(left: Iterator[Batch], dataset: object) -> Iterator[Batch]:
    while True:
        try:
            with _named(dataset):
                batch = next(left)
        except StopIteration:
            return
        yield batch


@contextmanager
def _named(dataset: object) -> Iterator[None]:
    try:
        yield
    except (PartcError, StopIteration):
        raise
    except Exception as error:
        inside = getattr(dataset, "_inside", dataset)  # of ours, which makes batches of its rows
        raise _told(error, type(inside).__name__) from error


def _told(error: Exception, name: str) -> RunError:
    what, why = "the dataset or collate_fn failed", failed_at(error)
    do = "Mend it: dataset[row] gives one row, and collate_fn(rows) makes a batch of several."
    worker = _OF_WORKER.match(str(error))
    if worker:
        lines = [line for line in _LINE.findall(str(error)) if "site-packages" not in line[0]]
        place = f", at {lines[-1][0].rpartition('/')[2]}:{lines[-1][1]}" if lines else ""
        why = f"{worker[1]}: {str(error).strip().splitlines()[-1]}{place}"
    if "pickle" in why:
        what = "the dataset or collate_fn cannot be sent to a worker"
        do = "Write it as a class or def of a module, without lambdas, or pass num_workers=0."
    return RunError(where=f"loader, {name}", what=what, why=why, do=do)
