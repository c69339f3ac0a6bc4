"""Samplers and loaders for the rows of a dataset that a program's ranks read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from partc.data.loader import Loader, RowLoader
from partc.data.order import Last
from partc.data.same_rows import DO, number_of
from partc.data.share import Batch, Division, Share, rows_per_step
from partc.data.streams import OwnStreamLoader, StreamLoader
from partc.errors import RunError, UsageError
from partc.plan import Plan
from partc.program.no_dataset import check_loader, of_dataloader
from partc.program.tensors.holders import exchange_texts
from partc.wrong_calls import check_flag, check_whole_number, is_word, known_arguments, quoted

if TYPE_CHECKING:
    from partc.program import Program
    from partc.program.stage.runtime import Stage

Split = Literal["rows", "own"]  # what an iterable dataset gives: all rows, or those of one piece


def division_of(program: Program) -> Division:
    """How a program divides the rows of its batch among ranks."""
    return Division.of(Plan.parse(program.plan), program.mesh)


def rows_of(
    program: Program, rank: int, batch: Batch | None = None, per_step: int | None = None,
    last: Last = "drop",
) -> Share:  # fmt: skip
    """The rows of every step's batch that a rank reads.

    Args:
        program: its plan says which axes cut the batch.
        rank: of the mesh.
        batch: ``"global"``: all of them, ``"local"``: the rank's piece; None: what the plan says.
        per_step: how many rows the whole batch has; None: as many as were compiled.
        last: what becomes of the rows that fill no step.

    Raises:
        UsageError: the rows cannot be divided among the ranks, or the inputs leave it open how
            many there are; a smaller last step cannot be divided into the plan's microbatches.
    """
    program.role_of(rank)  # refuses a rank that the mesh has not
    plan = Plan.parse(program.plan)
    if plan.uneven is not None and last == "partial":
        raise UsageError(
            where='last="partial"', what="islands compute unequal numbers of microbatches",
            why=f"a step has {plan.uneven.whole} microbatches of equally many rows",
            do='Pass last="drop" or last="next".',
        )  # fmt: skip
    batch = plan.batch if batch is None else batch
    per_step = rows_per_step(plan, program.inputs) if per_step is None else per_step
    return Division.of(plan, program.mesh).share(rank, per_step, batch)


@known_arguments
def loader(
    self: Stage,
    dataset: Any,
    *,
    seed: int = 0,
    shuffle: bool | None = None,
    last: Last = "drop",
    batch: Batch | None = None,
    rows_per_step: int | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    seed_samples: bool = True,
    split: Split = "rows",
    **options: Any,
) -> Loader:
    """A torch DataLoader of the rows that this rank reads, for ``step``.

    All ranks call this together: they compare what they ask for.

    Args:
        dataset: with ``len`` and rows by number, as any map-style dataset of torch; or an
            iterable one.
        seed: of the order and of the samples' random numbers; the same on all ranks.
        shuffle: whether every epoch has an order of its own; None: yes, of rows by number. An
            iterable dataset has its own order.
        last: what becomes of the rows that fill no step at the end of an epoch: ``"drop"`` leaves
            them out, ``"partial"`` makes a smaller step of them, ``"next"`` takes them into the
            first step of the next epoch.
        batch: ``"local"``: this rank's piece of the batch; ``"global"``: the whole; None: what
            the program's step takes.
        rows_per_step: rows of all data ranks together; None: as many as were compiled.
        collate_fn: makes a batch of a list of rows; None: torch's default.
        seed_samples: seed the random numbers of each sample, so that they are the same whoever
            reads it. False: read the rows as they are, which is faster where nothing is drawn.
        split: of an iterable dataset. ``"rows"``: it gives the same rows on every rank, of which
            each keeps its own. ``"own"``: it gives the rows of this rank's piece alone, as
            ``split_dataset_by_node`` of Hugging Face does.
        options: of torch's DataLoader: ``num_workers``, ``prefetch_factor``, ``pin_memory``
            (default: on a GPU), ``persistent_workers`` and so on.

    Returns:
        A Loader: beside what a DataLoader has, ``state_dict``, ``load_state_dict``, ``set_epoch``
        and ``position``.

    Raises:
        RunError: ranks ask for different rows, such as with a seed for each rank.
        UsageError: the dataset is smaller than one step, the rows cannot be divided among the
            ranks, or an option contradicts the sampler.

    Example::

        loader = stage.loader(dataset, seed=0, num_workers=2)
        for ids, labels in loader:
            loss = stage.step(ids, labels)
    """
    check_whole_number(seed, "loader(seed=...)", -(2**63))
    check_flag(shuffle, "loader(shuffle=...)")
    check_flag(seed_samples, "loader(seed_samples=...)")
    check_loader(dataset, rows_per_step, {**options, "collate_fn": collate_fn})
    _check_word(split)
    if split == "own" and not _is_stream(dataset):
        raise _split_of_rows(dataset)
    shuffle = not _is_stream(dataset) if shuffle is None else shuffle
    asked = {
        "rows": None if _is_stream(dataset) else num_rows(dataset), "seed": seed,
        "shuffle": shuffle, "last": last, "batch": batch, "rows_per_step": rows_per_step,
        "seed_samples": seed_samples, "split": split,
    }  # fmt: skip
    check_alike(asked, self.device)
    if not _is_stream(dataset):
        _check_same_rows(dataset, self.device)
    options = {"pin_memory": self.device.type == "cuda", "collate_fn": collate_fn, **options}
    if _is_stream(dataset):
        share = rows_of(self._program, dist.get_rank(), batch, rows_per_step, last)
        if shuffle:
            raise UsageError(
                where="loader(shuffle=True)", what=f"the dataset is {quoted(dataset)}",
                why="its rows have no numbers, and come in the order in which it gives them",
                do="Leave it out, and shuffle in the dataset (its set_epoch is told the epoch).",
            )  # fmt: skip
        _check_split(split, share, self._program.data_world)
        stream_loader = OwnStreamLoader if split == "own" else StreamLoader
        with of_dataloader():
            return stream_loader(dataset, share, self.device, seed=seed, last=last, **options)
    rows = self._program.sampler(
        dataset, dist.get_rank(),
        seed=seed, shuffle=shuffle, last=last, batch=batch, rows_per_step=rows_per_step,
    )  # fmt: skip
    with of_dataloader():
        return RowLoader(dataset, rows, seed_samples=seed_samples, **options)


def check_alike(asked: Mapping[str, Any], device: torch.device) -> None:
    """RunError on every rank if ranks ask for different rows: some would be read twice."""
    if dist.get_world_size() == 1:
        return
    told = [json.loads(text) for text in exchange_texts(json.dumps(asked), None, device)]
    for name in asked:
        other = next((rank for rank, each in enumerate(told) if each[name] != told[0][name]), 0)
        if other:
            raise RunError(
                where=f"loader({name}=...)",
                what=f"it is {told[0][name]!r} on rank 0 and {told[other][name]!r} on rank {other}",
                why="each rank takes its part of one order, so some rows would come twice",
                do="Pass the same on all ranks: which rows a rank reads differs by itself.",
            )


def _check_same_rows(dataset: Any, device: torch.device) -> None:
    """RunError on every rank if ranks give splits or orders that each has drawn by itself."""
    told = exchange_texts(str(number_of(dataset)), None, device) if dist.is_initialized() else [""]
    other = next((rank for rank, each in enumerate(told) if each != told[0]), 0)
    if other:
        raise RunError(
            where=f"loader({type(dataset).__name__})",
            what=f"rank {other} has other rows in it, or another order of them, than rank 0",
            why="each rank takes its part of one order, so some rows would come twice and some "
            "never",
            do=DO,
        )


def _is_stream(dataset: Any) -> bool:
    """Whether a dataset has no rows by number."""
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


def _check_word(split: str) -> None:
    """UsageError for a word that says nothing of how a dataset is split."""
    if not is_word(split, get_args(Split)):
        raise UsageError(
            where=f"loader(split={quoted(split)})",
            what="no dataset is split so",
            why="it gives all rows, or those of one piece",
            do=f"Give one of {', '.join(get_args(Split))}.",
        )


def _split_of_rows(dataset: Any) -> UsageError:
    return UsageError(
        where="loader(split='own')", what=f"the dataset is {quoted(dataset)}, with rows by number",
        why="split is for iterable datasets; of others each rank reads its rows by their numbers",
        do="Leave it out, and pass the whole dataset on every rank.",
    )  # fmt: skip


def _check_split(split: Split, share: Share, data_world: int) -> None:
    """UsageError for a stream of one piece where the step takes the whole batch."""
    if split == "own" and share.world != data_world:
        raise UsageError(
            where='loader(split="own")',
            what=f"the dataset gives one of {data_world} pieces, the step takes the whole batch",
            why="a rank cannot read the rows of other ranks' streams",
            do='Pass batch="local" for a step that takes pieces, or a dataset with all rows and '
            'split="rows".',
        )


def num_rows(dataset: Any) -> int:
    """The number of rows of a dataset, or the number itself."""
    if isinstance(dataset, int):
        return check_whole_number(dataset, "the number of rows")
    if _is_stream(dataset) or not hasattr(dataset, "__len__"):
        raise UsageError(
            where=type(dataset).__name__,
            what="it has no rows by number",
            why="a sampler gives the numbers of rows",
            do="Pass a dataset with __len__ and __getitem__, or the number of rows; "
            "stage.loader takes an iterable dataset too.",
        )
    return len(dataset)


def rank_or_own(rank: int | None) -> int:
    """A rank, or this process's."""
    if rank is not None:
        return rank
    if dist.is_initialized():
        return dist.get_rank()
    if "RANK" in os.environ:
        return int(os.environ["RANK"])
    raise UsageError(
        where="sampler",
        what="there is no process group, so this process has no rank",
        why="which rows a rank reads follows from its number",
        do="Pass rank=, or start the script with torchrun.",
    )
