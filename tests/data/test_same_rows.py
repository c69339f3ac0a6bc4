"""Datasets and orders that each rank has drawn by itself are refused; the same ones are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler

import partc
from partc.data.same_rows import number_of
from partc.errors import RunError
from partc.verification.processes import Processes
from tests.wrappers.single import as_torchrun

X = torch.arange(64 * 8, dtype=torch.float32).view(64, 8) / 512


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def split(seed: int) -> Any:
    return random_split(TensorDataset(X), [48, 16], generator=drawn(seed))[0]


DATASETS: dict[str, Callable[[int], Any]] = {
    "split": split,
    "split of a split": lambda seed: Subset(split(seed), range(0, 40, 2)),
    "joined": lambda seed: ConcatDataset([TensorDataset(X), split(seed)]),
    "shuffled tensors": lambda seed: TensorDataset(X[torch.randperm(64, generator=drawn(seed))]),
    "shuffled list": lambda seed: [
        {"row": f"text {i}"} for i in torch.randperm(64, generator=drawn(seed)).tolist()
    ],
}


@pytest.mark.parametrize("name", DATASETS)
def test_a_number_tells_datasets_apart_that_were_drawn_by_other_seeds(name: str) -> None:
    first, again, other = (number_of(DATASETS[name](seed)) for seed in (0, 0, 1))
    assert first == again
    assert first != other


class Drawing:
    """Rows that are drawn when they are read: no two reads are alike."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, row: int) -> torch.Tensor:
        raise AssertionError("a row was read")


def test_rows_that_a_dataset_makes_are_not_read() -> None:
    assert number_of(Drawing()) == number_of(Drawing())


def by_sampler(seed: int) -> None:
    rows(split(seed), DistributedSampler(split(seed), seed=0))


def by_seed(seed: int) -> None:
    rows(TensorDataset(X), DistributedSampler(TensorDataset(X), seed=seed))


def by_epoch(seed: int) -> None:
    sampler: Any = DistributedSampler(TensorDataset(X))
    sampler.set_epoch(seed)
    rows(TensorDataset(X), sampler)


def rows(dataset: Any, sampler: Any) -> None:
    model = partc.parallelize(nn.Linear(8, 4), "dp=2", plan="ddp")
    for (x,) in DataLoader(dataset, 4, sampler=sampler):
        model(x).square().mean().backward()


def by_program(seed: int) -> None:
    model = partc.parallelize(nn.Linear(8, 4), "dp=2", plan="ddp")
    model.compile_for(X[:4])
    for (x,) in DataLoader(split(seed), batch_sampler=model.program.sampler(split(seed))):
        model(x).square().mean().backward()


def by_loader(seed: int) -> None:
    model = partc.parallelize(nn.Linear(8, 4), "dp=2", plan="ddp")
    model.compile_for(X[:4])
    model.loader(split(seed))


def by_accelerate(seed: int) -> None:
    from partc.wrappers.accelerate import Accelerator

    with as_torchrun():
        accelerator = Accelerator(mesh="dp=2", plan="ddp", cpu=True)
        model, loader = accelerator.prepare(nn.Linear(8, 4), DataLoader(split(seed), 4))
        for (x,) in loader:
            accelerator.backward(model(x).square().mean())


WAYS = [by_sampler, by_seed, by_epoch, by_program, by_loader, by_accelerate]


def dealt(way: Callable[[int], None]) -> None:
    way(0)
    with pytest.raises(RunError, match=r"other rows.*random_split"):
        way(dist.get_rank())


@pytest.mark.exhaustive
@pytest.mark.gloo
@pytest.mark.parametrize("way", WAYS, ids=lambda way: str(way.__name__))
def test_rows_that_each_rank_draws_by_itself_are_refused(
    way: Callable[[int], None], world: Processes
) -> None:
    world.run(dealt, way, num=2)


def by_each_host() -> None:
    """A host's ranks share its own files, here one rank each."""
    dataset = TensorDataset(X + dist.get_rank())
    rows(dataset, DistributedSampler(dataset, num_replicas=1, rank=0))


@pytest.mark.gloo
def test_rows_that_each_host_deals_out_to_its_own_ranks_are_not_compared(world: Processes) -> None:
    world.run(by_each_host, num=2)
