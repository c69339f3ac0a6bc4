"""Sums of more terms than Python's stack has room for, where each term is a call deeper."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import partc

TERMS = 320
ROOM = 250  # what torch's tracing and a compile of a single layer need


class Terms(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear, self.way = nn.Linear(4, 4), way

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        terms = [(x * i).sin() for i in range(TERMS)]
        result: Tensor = sum(terms, x) if self.way == "sum" else torch.stack(terms)
        return result.mean()


@pytest.fixture
def short_stack() -> Iterator[None]:
    """A stack that has room for a compile, but not for a call per term."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + ROOM)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", ["sum", "stack"])
@pytest.mark.usefixtures("short_stack")
def test_each_term_takes_no_room_of_the_stack(way: str) -> None:
    torch.manual_seed(0)
    model, x = Terms(way), torch.randn(4, 4)
    program = partc.compile(model, "dp=2", x, plan="ddp")
    partc.verify(program, model, x).check()
