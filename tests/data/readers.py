"""A program over dp and tp, a dataset that counts its reads, and samplers of ranks, for tests."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import partc
from partc.data.course import Position
from partc.data.order import Last, Order
from partc.data.sampler import RowSampler
from partc.data.share import Division
from partc.plan.mesh import Mesh
from partc.plan.sharding import cut
from partc.program import Program

BATCH = 16


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


def model_of() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4))


@cache
def program_of(mesh: str, plan: str = "ddp", microbatches: int = 1) -> Program:
    """A program of a small model for a batch of 16 rows."""
    batch = torch.zeros(BATCH, 6), torch.zeros(BATCH, 4)
    return partc.compile(
        model_of(), mesh, batch, loss=loss_of, plan=plan, microbatches=microbatches
    )


def sampler_of(
    num_rows: int,
    rank: int,
    dp: int,
    *,
    per_step: int = BATCH,
    last: Last = "drop",
    shuffle: bool = True,
    tp: int = 1,
    seed: int = 7,
) -> RowSampler:
    """The sampler of one rank of a mesh of dp and tp, whose step takes pieces of the batch."""
    division = Division(Mesh((("dp", dp), ("tp", tp))), {"dp": cut(0)})
    share = division.share(rank, per_step, "local")
    return RowSampler(Order(num_rows, per_step, shuffle, last), share, seed)


def at(sampler: RowSampler, epoch: int, index: int) -> RowSampler:
    """The sampler, standing at another place."""
    sampler.course.position = Position(sampler.position.seed, epoch, index)
    return sampler


class Counted(Dataset[Any]):
    """Rows that say their number and three random numbers; counts how often each is read."""

    def __init__(self, num_rows: int) -> None:
        self.reads = torch.zeros(num_rows, dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return len(self.reads)

    def __getitem__(self, row: int) -> tuple[int, Tensor, float, float]:
        self.reads[row] += 1
        return row, torch.rand(2, dtype=torch.float64), float(np.random.rand()), random.random()
