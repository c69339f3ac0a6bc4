"""Loaders of iterable datasets: a stream that all ranks share, and one of each data rank."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from partc.data.digest import digest_of
from partc.data.order import Last
from partc.data.share import Share
from partc.data.streams import OwnStreamLoader, StreamLoader
from partc.errors import LoadError, UsageError
from tests.data.readers import sampler_of

pytestmark = pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
CPU = torch.device("cpu")
Batches = list[tuple[list[int], list[float]]]


class Stream(IterableDataset[Any]):
    """Rows in an order of its own, which splits itself among workers as torch's page says."""

    def __init__(self, num_rows: int, piece: int = 0, pieces: int = 1) -> None:
        self.num_rows, self.piece, self.pieces, self.epoch = num_rows, piece, pieces, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[int, float]]:
        info = get_worker_info()
        number, num = (info.id, info.num_workers) if info else (0, 1)
        shift = self.epoch * 1000
        for row in range(self.piece, self.num_rows, self.pieces):
            if row // self.pieces % num == number:
                yield row + shift, float(torch.rand(())) + float(np.random.rand())


def share_of(rank: int, dp: int, per_step: int = 8) -> Share:
    return sampler_of(100, rank, dp, per_step=per_step).share


def stream_loader(rank: int, dp: int, num: int = 42, **options: Any) -> StreamLoader:
    return StreamLoader(Stream(num), share_of(rank, dp), CPU, **options)


def told(batches: Any) -> Batches:
    return [(rows.tolist(), draws.tolist()) for rows, draws in batches]


def rows_of(batches: Any) -> list[int]:
    return [row for rows, _ in told(batches) for row in rows]


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_ranks_keep_their_rows_of_one_stream(num_workers: int) -> None:
    whole = dict(zip(*map(list, zip(*_pairs([stream_loader(0, 1)]), strict=True)), strict=True))
    loaders = [stream_loader(rank, 4, num_workers=num_workers) for rank in range(4)]
    assert dict(_pairs(loaders)) == whole
    assert sorted(whole) == list(range(40))
    assert len(set(whole.values())) == 40
    again = sorted(row for loader in loaders for row in rows_of(loader))
    assert again == list(range(1000, 1040))  # the dataset is told its epoch


def _pairs(loaders: list[StreamLoader]) -> list[tuple[int, float]]:
    """Rows and draws of all ranks."""
    found = []
    for loader in loaders:
        for rows, draws in told(loader):
            found += list(zip(rows, draws, strict=True))
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_shared_stream_resumes_on_other_ranks_and_workers(num_workers: int) -> None:
    expected = told(stream_loader(0, 1))
    for stop in range(1, 5):
        saving = stream_loader(1, 4, num_workers=2 - num_workers)
        assert len(list(islice(saving, stop))) == stop
        resumed = stream_loader(0, 1, num_workers=num_workers)
        resumed.load_state_dict(saving.state_dict())
        assert told(resumed) == expected[stop:]


def test_the_last_step_of_a_stream() -> None:
    pieces = [told(stream_loader(rank, 2, last="partial")) for rank in range(2)]
    assert [len(steps[-1][0]) for steps in pieces] == [1, 1]
    assert sorted(row for steps in pieces for rows, _ in steps for row in rows) == [*range(42)]
    for num_workers in (0, 2):
        with pytest.raises(UsageError, match="has 2 rows for 4 data ranks"):
            list(stream_loader(0, 4, last="partial", num_workers=num_workers))


class Sized(Stream):
    def __len__(self) -> int:
        return self.num_rows


def test_a_stream_with_a_length_says_how_many_steps_it_has() -> None:
    ends: tuple[Last, ...] = ("drop", "partial")
    for last, num_steps in zip(ends, (5, 6), strict=True):
        loader = StreamLoader(Sized(42), share_of(1, 2), CPU, last=last)
        assert len(loader) == len(list(loader)) == num_steps
    with pytest.raises(TypeError):
        len(stream_loader(0, 1))


def test_reading_a_stream_changes_no_number_of_the_script() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    first = torch.rand(1)
    assert len(list(stream_loader(0, 1))) == 5
    assert torch.equal(torch.cat([first, torch.rand(1)]), expected)


def own_loader(rank: int, dp: int, num: int = 42, **options: Any) -> OwnStreamLoader:
    return OwnStreamLoader(Stream(num, rank, dp), share_of(rank, dp), CPU, **options)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_own_streams_are_read_whole_and_resume_in_place(num_workers: int) -> None:
    expected = [told(own_loader(rank, 2, num_workers=num_workers)) for rank in range(2)]
    rows = [[row for rows, _ in batches for row in rows] for batches in expected]
    assert rows == [list(range(rank, 40, 2)) for rank in range(2)]
    for rank in range(2):
        saving = own_loader(rank, 2, num_workers=num_workers)
        assert len(list(islice(saving, 3))) == 3
        resumed = own_loader(rank, 2, num_workers=num_workers)
        resumed.load_state_dict(saving.state_dict())
        assert told(resumed) == expected[rank][3:]
        assert rows_of(resumed) == [row + 1000 for row in rows[rank]]


def test_own_streams_do_not_resume_elsewhere() -> None:
    state = own_loader(0, 2).state_dict()
    with pytest.raises(LoadError, match="saved with data_world=2, here it is 4"):
        own_loader(0, 4).load_state_dict(state)
    with pytest.raises(LoadError, match=r"num_workers=0, here it is 2.*begin an epoch"):
        own_loader(0, 2, num_workers=2).load_state_dict(state)
    with pytest.raises(LoadError, match="saved with data_world=2, here it is None"):
        stream_loader(0, 2).load_state_dict(state)


@pytest.mark.parametrize("last", ["next", "pad"])
def test_ends_that_streams_do_not_have_are_refused(last: Last) -> None:
    with pytest.raises(UsageError, match="end"):
        stream_loader(0, 1, last=last)
    with pytest.raises(UsageError, match="different steps"):
        own_loader(0, 1, last="partial")
    with pytest.raises(UsageError, match="persistent_workers"):
        stream_loader(0, 1, persistent_workers=True, num_workers=1)


def test_digests_tell_rows_apart() -> None:
    rows = [
        {"a": torch.tensor([1.0, 2.0]), "b": "text"}, {"a": torch.tensor([2.0, 1.0]), "b": "text"},
        {"a": torch.tensor([1.0, 2.0]), "b": "word"}, [np.arange(3)], [np.arange(3.0)], [3], [True],
        torch.tensor(1, dtype=torch.bfloat16), torch.tensor(2, dtype=torch.bfloat16),
    ]  # fmt: skip
    assert len({digest_of(row) for row in rows}) == len(rows)
    assert digest_of(rows[0]) == digest_of({"a": torch.tensor([1.0, 2.0]), "b": "text"})
