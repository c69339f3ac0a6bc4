"""A batch that is read before a training begins: the training reads what it would have read."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler

from partc.verification.processes import Processes
from partc.wrappers.read_ahead import draws_kept

ROWS = 12


class Noisy(Dataset[float]):
    """Rows with noise from generators of its own, of each kind."""

    def __init__(self) -> None:
        self.draws: dict[str, Any] = {
            "legacy": np.random.RandomState(1),
            "python": random.Random(2),
        }
        self.numpy = np.random.default_rng(3)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> float:
        noise = self.draws["legacy"].rand() + self.draws["python"].random() + self.numpy.random()
        return float(row + noise)


def loaders() -> tuple[DataLoader[float], DataLoader[float]]:
    """One that shuffles by a generator of its own, one whose sampler has it."""
    rows, sampler = Noisy(), RandomSampler(range(ROWS), generator=torch.Generator().manual_seed(5))
    mine = torch.Generator().manual_seed(4)
    return (
        DataLoader(rows, batch_size=4, shuffle=True, generator=mine),
        DataLoader(rows, batch_size=4, sampler=sampler),
    )


def read(both: tuple[DataLoader[float], ...]) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.stack([torch.cat([*each]) for each in both])


def test_loaders_draw_what_they_would_have_drawn() -> None:
    wanted, both = read(loaders()), loaders()
    with draws_kept([*both]):
        for each in both:
            next(iter(each))
    assert torch.equal(read(both), wanted)
    assert not torch.equal(read(both), wanted)  # the next epoch has another order


def orders() -> tuple[list[int], list[int]]:
    from tests.wrappers.lightning_runs import rows_read

    return rows_read(None), rows_read("dp=1")


@pytest.mark.gloo
def test_lightning_reads_in_the_order_of_one_process(world: Processes) -> None:
    alone, by_partc = world.run(orders, num=1)[0]
    assert sorted(alone) == [*range(ROWS)]
    assert by_partc == alone
