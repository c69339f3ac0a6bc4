"""What a script passes for a dataset, and is none: a loader, a batch, what can be read once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader

from partc.errors import UsageError
from partc.wrong_calls import check_whole_number, quoted

FEW = 3  # tensors of a batch; more may be rows


def check_loader(dataset: Any, rows_per_step: Any, options: Mapping[str, Any]) -> None:
    """UsageError for what is no dataset, and for numbers of rows or workers that are none."""
    if rows_per_step is not None:
        check_whole_number(rows_per_step, "loader(rows_per_step=...)", 1)
    for name, least in (("num_workers", 0), ("prefetch_factor", 1)):
        if options.get(name) is not None:
            check_whole_number(options[name], f"loader({name}=...)", least)
    collate = options.get("collate_fn")
    if collate is not None and not callable(collate):
        raise UsageError(
            where="loader(collate_fn=...)", what=f"it is {quoted(collate)}",
            why="it makes a batch of a list of rows", do="Pass a function, or leave it out.",
        )  # fmt: skip
    why, do = _instead(dataset)
    if why:
        raise UsageError(where="loader", what=f"the dataset is {quoted(dataset)}", why=why, do=do)


@contextmanager
def of_dataloader() -> Iterator[None]:
    """UsageError for options that torch's DataLoader does not take."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise UsageError(
            where="loader(...)",
            what=str(error),
            why="torch's DataLoader does not take that",
            do="Correct or leave out the option; the others are those of torch's DataLoader.",
        ) from None


def _instead(given: Any) -> tuple[str, str]:
    """Why it is no dataset, and what to pass in its place; two empty texts for a dataset."""
    if isinstance(given, type):
        return "it has no rows before it is made", f"Make one: {given.__name__}(...)."
    if isinstance(given, DataLoader):
        why = "it deals out rows by itself"
        return why, "Pass the dataset, loader.dataset; collate_fn and num_workers are arguments."
    if isinstance(given, Tensor | Mapping) or _is_batch(given):
        why = "it is one batch, and not one entry for each row"
        return why, "Pass torch.utils.data.TensorDataset(x, y)."
    if isinstance(given, Iterator):
        why = "it can be read once, and each epoch reads it anew"
        return why, "Pass the rows as a list, or an IterableDataset."
    if isinstance(given, str | int | float | None):
        return "it has no rows", "Pass a torch Dataset, a list of rows, or an IterableDataset."
    return "", ""


def _is_batch(given: Any) -> bool:
    """Whether it is a few tensors whose rows are those of one batch."""
    if not isinstance(given, list | tuple) or not 1 < len(given) <= FEW:
        return False
    tensors = [x for x in given if isinstance(x, Tensor | np.ndarray) and len(x.shape)]
    return len(tensors) == len(given) and len({len(x) for x in tensors}) == 1
