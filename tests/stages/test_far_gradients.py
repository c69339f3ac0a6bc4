"""Parameters whose gradient no op of their own stage makes: it is sent to them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from tests.patience import patience


class Moved(nn.Module):
    """Weights that an early layer shifts, and the last one multiplies by.

    ``of``: the layers that shift it; the backward of a sum hands on what the last layer computed.
    """

    start: Tensor

    def __init__(self, of: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.shared = nn.Parameter(torch.randn(8, 8) / 4)
        self.register_buffer("start", torch.randn(8, 8) / 4)
        self.of = of

    def forward(self, x: Tensor) -> Tensor:
        weights = []
        for i, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if i in self.of:
                weights.append(self.shared - self.start * x.mean())
        y: Tensor = F.linear(x, sum(weights[1:], weights[0]))
        return y


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y, reduction="sum")


@pytest.mark.rows(2)
@pytest.mark.parametrize("of", [(0,), (1,), (0, 1)], ids=str)
def test_a_gradient_is_sent_to_the_stage_of_its_parameter(of: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model, (x, y) = Moved(of), torch.randn(2, 4, 8)
    program = partc.compile(
        model, "pp=3", (x, y), loss=loss_of, plan="ddp", microbatches=1,
        stages=["layers.1", "layers.2"],
    )  # fmt: skip
    partc.verify(program, model, (x, y), loss=loss_of, timeout=patience()).check()
