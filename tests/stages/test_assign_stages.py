"""Where a backward stands in a pipeline, if autograd does not say what it is the backward of."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc


class Layer(nn.Module):
    """Writes into a view: the gradient of that has no forward call of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = torch.einsum("bd,be->bde", self.q(x), torch.tanh(x))[:, :, :8]
        scores *= mask
        y: Tensor = x + self.k(scores.sum(2))
        return y


class Net(nn.Module):
    """The mask is made of an activation of the first stage, and read in all."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        mask = F.pad(x.new_ones(16, 7), (1, 0))
        for layer in self.layers:
            x = layer(x, mask)
        return x


def squared(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).pow(2).mean()
    return loss


@pytest.mark.rows(1)
@pytest.mark.parametrize("stages", [["layers.1"], ["layers.2"], ["layers.3"]])
def test_it_stands_where_its_line_runs(stages: list[str]) -> None:
    torch.manual_seed(0)
    model, batch = Net(), (torch.randn(8, 16),)
    program = partc.compile(
        model, "pp=2", batch, loss=squared, plan="ddp", microbatches=2, stages=stages
    )
    partc.verify(program, model, batch, loss=squared).check()
