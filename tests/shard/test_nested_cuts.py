"""A dim is not cut over an axis whose shards would lie outside of those of the batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc


class Net(nn.Module):
    """A convolution cut by column, one whose weight stays whole, and a pair of products."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(8, 16, 5, padding=2)
        self.second = nn.Conv1d(16, 16, 5, padding=2)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.relu(self.up(self.second(F.relu(self.first(x))))))
        return y


def loss_of(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(model(x), target)


def test_activations_are_not_gathered_over_the_data_axis() -> None:
    batch = torch.randn(16, 8, 32), torch.randn(16, 16, 32)
    program = partc.compile(Net(), "dp=2,tp=2", batch, loss=loss_of, plan="ddp+megatron")
    source = program.source(rank=0)
    assert "all_gather over dp" not in source
    assert "@tp+dp" not in source
    partc.verify(program, Net(), batch, loss=loss_of).check()
