"""A net of U-shaped blocks, whose small blocks need each other: how often they are looked for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.codegen.repeats import blocks
from partc.codegen.repeats.blocks import GivenUp
from partc.codegen.repeats.runs import Loop
from partc.graph import Graph

DEEP, WIDTH = 2, 4


class Conv(nn.Module):
    def __init__(self, before: int, behind: int, dilation: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, behind, 3, padding=dilation, dilation=dilation)
        self.norm = nn.BatchNorm2d(behind)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(self.conv(x))
        return F.relu(result)


class Block(nn.Module):
    """A U of its own, each of whose steps is an attribute, as many such nets are written."""

    def __init__(self, before: int, behind: int) -> None:
        super().__init__()
        self.first, self.low = Conv(before, behind), Conv(WIDTH, WIDTH, 2)
        for i in range(DEEP):
            setattr(self, f"down{i}", Conv(behind if i == 0 else WIDTH, WIDTH))
            setattr(self, f"up{i}", Conv(2 * WIDTH, behind if i == 0 else WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y, kept = x, list[Tensor]()
        for i in range(DEEP):
            y = getattr(self, f"down{i}")(F.max_pool2d(y, 2, ceil_mode=True) if i else y)
            kept.append(y)
        y = self.low(y)
        for i in reversed(range(DEEP)):
            y = F.interpolate(y, size=kept[i].shape[2:])
            y = getattr(self, f"up{i}")(torch.cat([y, kept[i]], 1))
        result: Tensor = x + y
        return result


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Block(3, 8), Block(8, 8), Block(8, 8)
        self.d, self.e, self.head = Block(16, 8), Block(16, 8), nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        a: Tensor = self.a(x)
        b = self.b(F.max_pool2d(a, 2))
        c = self.c(F.max_pool2d(b, 2))
        d = self.d(torch.cat([F.interpolate(c, size=b.shape[2:]), b], 1))
        found: Tensor = self.head(self.e(torch.cat([F.interpolate(d, size=a.shape[2:]), a], 1)))
        return found


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return torch.as_tensor(model(x).square().mean())


@pytest.mark.exhaustive
def test_blocks_are_looked_for_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once more for each of the blocks that cannot be a loop; there are dozens of them."""
    looked, look = list[int](), blocks._loops

    def noted(graph: Graph, given_up: GivenUp, apart: GivenUp | None) -> list[Loop]:
        looked.append(len(given_up))
        return look(graph, given_up, apart)

    monkeypatch.setattr(blocks, "_loops", noted)
    model, x = Net().double(), torch.randn(4, 3, 16, 16, dtype=torch.float64)
    program = partc.compile(model, "dp=2", (x,), loss=squares, plan="ddp")
    assert len(looked) <= 6
    partc.verify(program, model, (x,), loss=squares).check()
