"""What a rank's sampler deals out, as numbers that ranks compare: each takes its part of one order
of one dataset. A split or an order that each rank draws by itself doubles rows, and loses others.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import ConcatDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from partc.data.digest import digest_of

SAMPLE = 256  # rows, or numbers of rows, that tell splits and orders apart
DEEPEST = 8  # of datasets in datasets
DO = (
    "Draw splits and orders alike on all ranks: random_split(dataset, [...], "
    "generator=torch.Generator().manual_seed(seed)), a shuffle with a seed, and DistributedSampler "
    "with one seed, whose set_epoch(epoch) all ranks call alike."
)
# Of the sampler that was read last since ranks compared: how many rows, what they are, and to how
# many pieces of a batch they are dealt.
_LAST: list[int] = [0, 0, 0]


def number_of(dataset: Any) -> int:
    """63 bits that follow from which rows a dataset has, where that is cheap to say: from the rows
    that a subset was given, from tensors and lists.
    """
    return _number(b"".join(_parts(dataset, 0)))


def note(dataset: Any, world: int, *more: Any) -> None:
    """Rows of this dataset are dealt out to so many from now on; ``more``: what else their order is
    of.
    """
    text = repr(more).encode() + b"".join(_parts(dataset, 0))
    _LAST[:] = [1 + len(dataset), _number(text), world]


def noted(worlds: Collection[int]) -> list[int]:
    """The numbers of what was dealt out last, and forgets them; zeros where nothing was, or where
    it was dealt to others than all ranks, as by each host from files of its own.
    """
    *found, world = _LAST
    _LAST[:] = [0, 0, 0]
    return found if world in worlds else [0, 0]


def watch_samplers() -> None:
    """Let what DistributedSampler deals out be noted, once in a process."""
    plain = DistributedSampler.__iter__
    if hasattr(plain, "__wrapped__"):
        return

    @functools.wraps(plain)
    def iterate(self: Any) -> Any:
        order = [self.seed, self.epoch] if self.shuffle else []
        note(self.dataset, self.num_replicas, self.shuffle, self.drop_last, *order)
        return plain(self)

    DistributedSampler.__iter__ = iterate  # type: ignore[method-assign]


def order_of(sampler: Any) -> list[Any]:
    """What is known of a sampler's order: its own numbers of rows, or its generator's state."""
    if hasattr(sampler, "initial_seed"):  # accelerate's, which seeds each epoch's order
        return [sampler.initial_seed, sampler.epoch]
    generator = getattr(sampler, "generator", None)
    indices = getattr(sampler, "indices", None)
    found = [] if generator is None else [generator.get_state().numpy().tobytes()]
    return found if indices is None else [*found, *_sampled(indices)]


def _parts(dataset: Any, depth: int) -> Iterator[bytes]:
    """Texts that tell one dataset from others; its other rows are not read, as they may draw."""
    yield f"{type(dataset).__name__} {depth}".encode()
    if depth == DEEPEST:
        return
    indices = getattr(dataset, "indices", None)  # of a Subset
    if isinstance(indices, Sequence | Tensor | np.ndarray):
        yield from map(digest_of, _sampled(indices))
    table: Any = getattr(dataset, "_indices", None)  # of a Hugging Face dataset that was shuffled
    if hasattr(table, "column"):
        yield from (str(each).encode() for each in _sampled(table.column(0)))
    if isinstance(dataset, list | tuple | Tensor | np.ndarray):
        yield from map(digest_of, _sampled(dataset))
    if isinstance(dataset, TensorDataset):
        yield from (digest_of(row) for each in dataset.tensors for row in _sampled(each))
    inner = dataset.datasets if isinstance(dataset, ConcatDataset) else [_inner(dataset)]
    for each in inner:
        if each is not None:
            yield from _parts(each, depth + 1)


def _inner(dataset: Any) -> Any:
    """The dataset that another one is made of; None if it is of none, or does not say."""
    return None if isinstance(dataset, list | tuple | Tensor) else getattr(dataset, "dataset", None)


def _sampled(rows: Any) -> Iterator[Any]:
    """Some of the rows, evenly spaced."""
    return (rows[i] for i in range(0, len(rows), max(1, len(rows) // SAMPLE)))


def _number(text: bytes) -> int:
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") >> 1
