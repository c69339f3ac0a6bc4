"""A pipeline's further program that runs nothing of the weights, on real gloo processes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import partc
from partc.verification.processes import Processes

WIDTH, LARGE = 8, 50_000  # rows of a table above what a program keeps as a constant


class Model(nn.Module):
    """In eval mode it adds its table alone, as parts of a model do that a script calls."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.randn(rows, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = x + self.get_buffer("table")[: len(x)]
        return torch.as_tensor(self.b(self.a(added))) if self.training else added


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return torch.as_tensor(model(x).square().mean())


def evaluated(rows: int) -> None:
    model, x = Model(rows).double(), torch.randn(4, WIDTH, dtype=torch.float64)
    stage = partc.compile(model, "pp=2", (x,), loss=squares, plan="ddp", stages=["b"]).module()
    torch.testing.assert_close(stage.step(x), squares(model, x))
    with torch.no_grad():
        torch.testing.assert_close(stage.eval()(x), model.eval()(x))


@pytest.mark.rows(1)
@pytest.mark.gloo
@pytest.mark.parametrize("rows", [4, LARGE])
def test_a_table_is_added_where_it_is(rows: int, world: Processes) -> None:
    world.run(evaluated, rows, num=2)
