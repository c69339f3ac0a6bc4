"""A program with two masks, and with bounds that small numbers do not reach."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.program import Program
from tests.zoo import Case


class Bounded(nn.Module):
    """Two masks, and bounds of which small numbers reach none."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.one, self.two = nn.Dropout(0.1), nn.Dropout(0.1)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        y = F.normalize(self.one(F.relu6(self.first(x))), dim=-1)
        z: Tensor = self.two(self.second(torch.tanh(y)))
        return z.clamp(-30.0, 30.0)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


@cache
def program() -> Program:
    return case_and_program()[1]


def case_and_program() -> tuple[Case, Program]:
    torch.manual_seed(0)
    case = Case(Bounded(), (torch.randn(8, 8),), loss_of)
    return case, partc.compile(case.step, "dp=2", plan="ddp")
