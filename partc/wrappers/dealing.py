"""Which rows of a DataLoader a rank reads: ranks that work on the same samples read the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard
from accelerate.utils import slice_tensors
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler

from partc.data.same_rows import note, order_of
from partc.data.share import Division
from partc.errors import UsageError
from partc.plan.batch import data_axes
from partc.plan.mesh import Mesh, MeshLike
from partc.plan.sharding import cut

Rows = list[int]  # numbers in the dataset


@dataclass(frozen=True)
class DataRanks:
    """The pieces into which a mesh divides every batch, and who has which."""

    mesh: Mesh

    @classmethod
    def of(cls, mesh: MeshLike) -> DataRanks:
        """UsageError for a mesh whose axes are open: how many pieces there are is not known."""
        found = Mesh.of(mesh)
        if found.is_open:
            raise UsageError(
                where=f"mesh {found}",
                what="its axes are open",
                why="loaders are dealt out before a plan is searched",
                do='Give the mesh axes: mesh="dp=4,tp=2".',
            )
        return cls(found)

    @cached_property
    def pieces(self) -> list[int]:
        """The number of the piece that each rank has, by rank."""
        division = Division(self.mesh, {axis: cut(0) for axis in data_axes(self.mesh)})
        return [division.rank(rank) for rank in range(self.mesh.num_ranks)]

    @cached_property
    def firsts(self) -> list[int]:
        """The first rank that has each piece, in the order of the pieces."""
        return [self.pieces.index(piece) for piece in range(self.world)]

    @property
    def world(self) -> int:
        """The number of pieces."""
        return max(self.pieces) + 1


class DealtRows(BatchSamplerShard):  # type: ignore[misc]
    """The batches of one data rank: no row is read twice, and none is left out.

    Of every ``num_processes`` batches a rank has the one of its number (with ``split_batches`` its
    piece of each). The last rows of an epoch are dealt out anew: 5 rows to 2 ranks are 2 and 3.
    """

    def __init__(self, batches: Any, world: int, piece: int, split: bool) -> None:
        super().__init__(batches, world, piece, split_batches=split)
        self.sampler = getattr(batches, "sampler", None)

    def __len__(self) -> int:
        num: int = len(self.batch_sampler)
        if self.split_batches:
            return num
        world: int = self.num_processes
        return num // world if self.drop_last else -(-num // world)

    def __iter__(self) -> Iterator[Rows]:
        per_step = 1 if self.split_batches else self.num_processes
        source = getattr(self.sampler, "data_source", None)
        if self.num_processes > 1 and hasattr(source, "__len__"):
            note(source, self.num_processes, type(self.sampler).__name__, *order_of(self.sampler))
        group: list[Rows] = []
        for batch in self.batch_sampler:
            group.append(batch)
            if len(group) == per_step:
                yield self._mine(group)
                group = []
        if group and not self.drop_last:
            yield self._mine(group)

    def _mine(self, group: list[Rows]) -> Rows:
        if len(group) == self.num_processes > 1 and len({len(each) for each in group}) == 1:
            return group[self.process_index]
        rows = [row for each in group for row in each]
        begin, end = (
            len(rows) * piece // self.num_processes
            for piece in (self.process_index, self.process_index + 1)
        )
        return rows[begin:end]


@dataclass(frozen=True)
class Collate:
    """A collate function that makes a batch without rows of none: ``i64[0,16]``."""

    function: Callable[[list[Any]], Any]
    dataset: Any

    def __call__(self, rows: list[Any]) -> Any:
        if rows:
            return self.function(rows)
        return slice_tensors(self.function([self.dataset[0]]), slice(0, 0))


def dealt(loader: DataLoader[Any], ranks: DataRanks, rank: int, split: bool) -> DataLoader[Any]:
    """A loader of the rows that one rank reads.

    UsageError for an iterable dataset, which gives its rows in an order of its own, for one that
    makes no batches, and for a sampler that has dealt out the rows already.
    """
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        raise _not_numbered(loader)
    sampler = getattr(loader.batch_sampler, "sampler", None)
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        raise _dealt_already(loader, sampler.num_replicas)
    names = (
        "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
        "generator", "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order",
    )  # fmt: skip
    return DataLoader(
        loader.dataset,
        batch_sampler=DealtRows(loader.batch_sampler, ranks.world, ranks.pieces[rank], split),
        collate_fn=Collate(loader.collate_fn, loader.dataset),
        **{name: getattr(loader, name) for name in names},
    )


def drawn_seed() -> int:
    """A number of the process's random numbers, as a sampler without a generator draws it."""
    return int(torch.empty((), dtype=torch.int64).random_())


def in_one_order(loader: DataLoader[Any], seed: int) -> None:
    """Let a shuffled loader draw its order from a seed that all ranks have."""
    sampler = getattr(loader.batch_sampler, "sampler", None)
    if isinstance(sampler, RandomSampler) and sampler.generator is None:
        sampler.generator = torch.Generator().manual_seed(seed)


def _dealt_already(loader: DataLoader[Any], replicas: int) -> UsageError:
    return UsageError(
        where=f"prepare(DataLoader of {type(loader.dataset).__name__})",
        what=f"its DistributedSampler deals out the rows to {replicas} already",
        why="prepare deals out to ranks what the loader reads: most rows would never be read",
        do="Leave the DistributedSampler out: DataLoader(dataset, batch_size, shuffle=True).",
    )


def _not_numbered(loader: DataLoader[Any]) -> UsageError:
    return UsageError(
        where=f"prepare(DataLoader of {type(loader.dataset).__name__})",
        what="its rows have no numbers by which ranks could take theirs",
        why="it is an iterable dataset, or makes no batches",
        do="Leave the loader out of prepare, and let the dataset give each data rank its own "
        "rows (partc.wrappers.accelerate.Accelerator.data_rank and num_processes).",
    )
