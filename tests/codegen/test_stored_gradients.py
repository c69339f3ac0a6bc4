"""What becomes ``.grad`` has memory of its own, to which later microbatches and steps add."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import partc
from partc.verification.verification import verify


class Summed(nn.Module):
    """The gradients of its vectors are one number or one tensor, seen through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.scales = nn.Parameter(torch.full((3,), 0.5))
        self.first, self.second = nn.Parameter(torch.rand(8)), nn.Parameter(torch.rand(8))
        self.square = nn.Parameter(torch.rand(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(x))) * self.scales.sum()
        return y + self.first + self.second + self.square.mean() + self.square.sum(0).sum()


@pytest.mark.rows(2)
@pytest.mark.parametrize(
    ("mesh", "plan", "microbatches"),
    [("dp=1", "ddp", 2), ("dp=2", "fsdp", 2), ("tp=2", "megatron", 1), ("pp=2", "ddp", 2)],
)
def test_gradients_that_are_views_can_be_added_to(mesh: str, plan: str, microbatches: int) -> None:
    torch.manual_seed(0)
    model, batch = Summed(), (torch.randn(8, 8), torch.randn(8, 8))

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(model(x), y)

    program = partc.compile(model, mesh, batch, loss=loss, plan=plan, microbatches=microbatches)
    verify(program, model, batch, loss).check()
