"""What the user's code calls ``_`` may be read by the backward; a program's ``_`` is never read."""

from __future__ import annotations

import ast

import torch
from torch import nn
from torch.nn import functional as F

import partc
from tests.patience import patience


class Picks(nn.Module):
    """The places of the largest values are dropped, and then the values of the largest places."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.head = nn.Linear(6, 12), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.into(x))
        top, _ = h.topk(4, -1)
        _, places = h.sin().topk(4, -1)
        y: torch.Tensor = self.head(top + torch.gather(h, 1, places))
        return y


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def test_no_value_is_called_as_what_is_thrown_away() -> None:
    torch.manual_seed(0)
    model = Picks().double()
    batch = torch.randn(8, 6, dtype=torch.float64), torch.arange(8) % 3
    program = partc.compile(model, "dp=2", batch, loss=loss_of, plan="ddp")
    names = (n for n in ast.walk(ast.parse(program.source())) if isinstance(n, ast.Name))
    used = {type(n.ctx) for n in names if n.id == "_"}
    assert used == {ast.Store}
    partc.verify(program, model, batch, loss=loss_of, timeout=patience()).check()
