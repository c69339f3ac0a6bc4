"""Loaders: rows, random numbers and positions do not depend on workers or on ranks."""

from __future__ import annotations

import pickle
import random
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, get_worker_info

from partc.data.loader import RowLoader
from partc.errors import LoadError, UsageError
from tests.data.readers import Counted, sampler_of

pytestmark = pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
WORKERS = (0, 1, 2)
Samples = dict[int, tuple[float, ...]]  # by row


def loader_of(
    dataset: Any, rank: int = 0, dp: int = 1, *, num_rows: int = 40, **options: Any
) -> RowLoader:
    return RowLoader(dataset, sampler_of(num_rows, rank, dp, per_step=8), **options)


def samples_of(batches: list[Any]) -> Samples:
    """The random numbers of every row."""
    return {
        int(row): (*torch_draws.tolist(), float(a), float(b))
        for rows, torch_rows, numpy_rows, python_rows in batches
        for row, torch_draws, a, b in zip(rows, torch_rows, numpy_rows, python_rows, strict=True)
    }


@pytest.fixture(scope="module")
def samples() -> Samples:
    """An epoch's samples, read in one process by one rank."""
    return samples_of(list(loader_of(Counted(40))))


@pytest.mark.exhaustive
@pytest.mark.parametrize("num_workers", WORKERS)
def test_samples_follow_from_their_place_alone(num_workers: int, samples: Samples) -> None:
    dataset = Counted(40)
    found: Samples = {}
    for rank in range(4):
        found |= samples_of(list(loader_of(dataset, rank, 4, num_workers=num_workers)))
    assert dataset.reads.tolist() == [1] * 40
    assert found == samples
    assert len(set(samples.values())) == 40


def test_another_epoch_draws_other_numbers(samples: Samples) -> None:
    loader = loader_of(Counted(40))
    loader.set_epoch(1)
    others = samples_of(list(loader))
    assert all(others[row] != samples[row] for row in range(40))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_reading_changes_no_number_of_the_script(num_workers: int) -> None:
    def draw() -> list[float]:
        return [float(torch.rand(())), float(np.random.rand()), random.random()]

    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    expected = [draw(), draw()]
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    found = [draw()]
    assert len(list(loader_of(Counted(40), num_workers=num_workers))) == 5
    assert [*found, draw()] == expected


@pytest.mark.rows(4)
@pytest.mark.parametrize("saved_with", WORKERS)
@pytest.mark.parametrize("resumed_with", WORKERS)
def test_a_run_resumes_behind_what_the_script_took(
    saved_with: int, resumed_with: int, samples: Samples
) -> None:
    """Whatever workers had read ahead by then, and on other ranks."""
    first = [loader_of(Counted(40), rank, 4, num_workers=saved_with) for rank in range(4)]
    taken = [[*islice(loader, 2)] for loader in first]
    (state,) = {str(loader.state_dict()): loader.state_dict() for loader in first}.values()
    assert (state["epoch"], state["index"]) == (0, 16)
    found = samples_of([batch for batches in taken for batch in batches])
    for rank in range(2):
        loader = loader_of(Counted(40), rank, 2, num_workers=resumed_with)
        loader.load_state_dict(state)
        loader.set_epoch(0)  # as a script does at the head of its loop over epochs
        rest = samples_of(list(loader))
        assert not set(rest) & set(found)
        found |= rest
        assert (loader.position.epoch, loader.position.index) == (1, 0)
    assert found == samples


def test_kept_workers_follow_a_position_that_is_loaded() -> None:
    loader = loader_of(Counted(40), num_workers=2, persistent_workers=True)
    alone = loader_of(Counted(40))
    assert samples_of(list(loader)) == samples_of(list(alone))
    state = {**loader.state_dict(), "seed": 5, "epoch": 4, "index": 8}
    loader.load_state_dict(state)
    alone.load_state_dict(state)
    assert samples_of(list(loader)) == samples_of(list(alone))
    assert samples_of(list(loader)) == samples_of(list(alone))  # the epoch after
    assert len([*islice(loader, 2)]) == len([*islice(alone, 2)])  # left with batches read ahead
    assert samples_of(list(loader)) == samples_of(list(alone))


class Noisy(Dataset[Tensor]):
    scale, shift = 1.0, 0.0

    def __len__(self) -> int:
        return 40

    def __getitem__(self, row: int) -> Tensor:
        return torch.tensor(self.scale * row + self.shift)


def with_noise(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """As a collator that masks words."""
    return torch.stack(rows), torch.rand(len(rows))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_collate_draws_follows_from_the_step(num_workers: int) -> None:
    def batches(rank: int, workers: int) -> list[list[Tensor]]:
        rows = sampler_of(40, rank, 2, tp=2, per_step=8)
        loader = RowLoader(Noisy(), rows, collate_fn=with_noise, num_workers=workers)
        return [list(batch) for batch in loader]

    one, twin, other = (batches(rank, num_workers) for rank in (0, 1, 2))
    for mine, same, apart in zip(one, twin, other, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, same, strict=True))
        assert not torch.equal(mine[1], apart[1])
    assert all(torch.equal(a[1], b[1]) for a, b in zip(one, batches(0, 0), strict=True))


class Together(Noisy):
    """Reads many rows at once, as Hugging Face's datasets do."""

    calls = 0

    def __getitems__(self, rows: list[int]) -> list[Tensor]:
        self.calls += 1
        return [self[row] for row in rows]


def test_rows_are_read_together_where_no_sample_is_seeded() -> None:
    dataset = Together()
    plain, seeded = loader_of(dataset, seed_samples=False), loader_of(dataset)
    read = torch.cat(list(plain))
    assert dataset.calls == 5
    assert torch.equal(read, torch.cat(list(seeded)))
    assert dataset.calls == 5


def test_a_loader_is_a_loader_of_torch() -> None:
    x = torch.arange(40.0)
    loader = loader_of(TensorDataset(x, 2 * x), num_rows=40)
    assert isinstance(loader, torch.utils.data.DataLoader)
    dataset: Any = loader.dataset
    assert (len(loader), len(dataset), loader.batch_size) == (5, 40, 8)
    twin = pickle.loads(pickle.dumps(dataset))  # as workers get it that are not forked
    assert all(map(torch.equal, twin[next(iter(loader.sampler))], next(iter(loader))))
    loader.set_epoch(0)
    assert dataset.tensors[0] is x  # what scripts read there
    loader.sampler.set_epoch(2)  # type: ignore[attr-defined]
    assert loader.position.epoch == 2
    for a, b in loader:
        assert a.shape == (8,)
        assert torch.equal(b, 2 * a)
    with pytest.raises(AttributeError, match="classes"):
        _ = dataset.classes


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_a_script_sets_on_the_dataset_arrives(num_workers: int) -> None:
    loader = loader_of(Noisy(), num_workers=num_workers, worker_init_fn=add_one)
    before = torch.cat(list(loader))
    loader.dataset.scale = 2.0  # type: ignore[attr-defined]
    loader.set_epoch(0)
    after = torch.cat(list(loader))
    assert torch.equal(before - num_workers, (after - num_workers) / 2)


def add_one(worker: int) -> None:
    """What scripts do to the copy of a dataset in a worker."""
    info = get_worker_info()
    assert info is not None
    dataset: Any = info.dataset
    dataset.shift = 1.0


def test_an_iterator_that_was_left_moves_no_position() -> None:
    loader = loader_of(Noisy())
    left = iter(loader)
    next(left)
    again = iter(loader)
    next(again)
    next(left)
    assert (loader.position.epoch, loader.position.index) == (1, 8)


@pytest.mark.parametrize("option", ["batch_size", "sampler", "drop_last", "generator", "in_order"])
def test_what_the_sampler_decides_is_refused(option: str) -> None:
    options: dict[str, Any] = {option: None}
    with pytest.raises(UsageError, match=rf"loader\({option}=\.\.\.\).*program.data_world"):
        loader_of(Noisy(), **options)


def test_a_position_of_another_dataset_is_refused() -> None:
    state = loader_of(Noisy()).state_dict()
    other = loader_of(Noisy(), num_rows=24)
    with pytest.raises(LoadError, match=r"num_rows=40, here it is 24.*leave the position out"):
        other.load_state_dict(state)
    other.set_epoch(3)  # as the error says
    assert other.position.epoch == 3


class Growing(Dataset[int]):
    """Samples new negatives for each epoch, as recommenders do."""

    def __init__(self) -> None:
        self.num = 40

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> int:
        return index


def test_a_dataset_with_other_rows_needs_another_loader() -> None:
    data = Growing()
    loader = loader_of(data, num_rows=40)
    assert list(loader)
    data.num = 120
    with pytest.raises(UsageError, match=r"had 40 rows, and has 120.*stage\.loader"):
        list(loader)
