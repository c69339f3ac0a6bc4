"""A loss that divides by one rank's rows, written as a number, is told where it is of all ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.plan.batch import ONE_RANKS

ROWS = 6  # of a rank
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def classes(model: nn.Module, x: Tensor, y: Tensor, reduction: str = "sum") -> Tensor:
    return F.cross_entropy(model(x), y.argmax(1), reduction=reduction)


TOLD: dict[str, Loss] = {
    "a criterion": lambda m, x, y: classes(m, x, y) / ROWS,
    "squares": lambda m, x, y: F.mse_loss(m(x), y, reduction="sum") / ROWS,
    "rows and columns": lambda m, x, y: (m(x) - y).square().sum() / (ROWS * 5),
    "beside a penalty": lambda m, x, y: classes(m, x, y) / ROWS + m.weight.square().sum(),  # type: ignore
    "multiplied": lambda m, x, y: classes(m, x, y, "none").sum() * (1 / ROWS),
}
RIGHT: dict[str, Loss] = {
    "by the tensor": lambda m, x, y: classes(m, x, y) / len(x),
    "a mean": lambda m, x, y: classes(m, x, y, "mean"),
    "a mean over steps": lambda m, x, y: classes(m, x, y, "mean") / ROWS,
    "of each row": lambda m, x, y: (m(x) - y).square().sum(1).mean(),
}


def told(loss: Loss, batch: str = "local") -> bool:
    batch_of = torch.randn(ROWS, 7), torch.randn(ROWS, 5)
    program = partc.compile(
        nn.Linear(7, 5), "dp=2", batch_of, loss=loss, plan="ddp", batch=batch
    )  # fmt: skip
    return f"{ONE_RANKS}{ROWS}" in program.plan or f"{ONE_RANKS}{ROWS * 5}" in program.plan


@pytest.mark.rows(3)
@pytest.mark.parametrize("way", TOLD)
def test_a_number_of_one_ranks_rows_is_told(way: str) -> None:
    assert told(TOLD[way])


@pytest.mark.rows(2)
@pytest.mark.parametrize("way", RIGHT)
def test_a_mean_is_told_nothing(way: str) -> None:
    assert not told(RIGHT[way])


def test_a_batch_of_all_ranks_is_told_nothing() -> None:
    assert not told(TOLD["a criterion"], batch="global")
