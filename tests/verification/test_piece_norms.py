"""The reference of batch norms by pieces: all but their statistics is that of the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc

TARGETS = torch.tensor([0, 3, 1, 0, 2, 3, 3, 1])
BATCH = torch.randn(8, 8), TARGETS


class Net(nn.Module):
    """A batch norm that runs twice, one over a table of weights, and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, 16))
        self.linear, self.out = nn.Linear(8, 16), nn.Linear(16, 4)
        self.norm, self.of_table = nn.BatchNorm1d(16), nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(F.gelu(self.norm(self.linear(x))))
        return self.out(F.dropout(x, 0.2) + self.of_table(self.table).mean(0))  # type: ignore[no-any-return]


def ignoring(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, ignore_index=0)


def weighted(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, weight=torch.arange(1.0, 5.0))


@pytest.mark.rows(1)
@pytest.mark.parametrize(
    ("loss", "mesh", "how"),
    [
        (ignoring, "dp=2", {"batch_norm": "local"}),
        (weighted, "dp=2", {"microbatches": 2}),
        (ignoring, "pp=2", {"microbatches": 2}),
    ],
)
def test_weighted_means_over_the_whole_batch(loss: Any, mesh: str, how: dict[str, Any]) -> None:
    model = Net()
    program = partc.compile(model, mesh, BATCH, loss=loss, plan="ddp", **how)
    partc.verify(program, model, BATCH, loss).check()
