"""The smallest use: compile a two-layer MLP for tp=2, print its plan and program, and verify it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc


class MLP(nn.Module):
    """Two linears around a gelu."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(16, 64)
        self.w2 = nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.w2(F.gelu(self.w1(x)))
        return y


def loss_of(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    """Mean squared error."""
    return F.mse_loss(model(x), target)


if __name__ == "__main__":
    model, batch = MLP(), (torch.randn(8, 16), torch.randn(8, 16))
    program = partc.compile(model, "tp=2", batch, loss=loss_of, plan="megatron")
    print(program.plan)
    print(program.source(rank=0))
    print(partc.verify(program, model, batch, loss=loss_of).check())  # both ranks, in threads
