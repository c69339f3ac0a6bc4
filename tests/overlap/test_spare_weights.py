"""A backward that reads a weight's sizes alone: no rank gathers the weight for it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import partc
from tests.patience import patience


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return y


class Net(nn.Module):
    """A first layer that reads the pictures, which need no gradient, and a tower on its pieces."""

    def __init__(self, first: nn.Module, width: int) -> None:
        super().__init__()
        self.first, self.into = first, nn.Linear(width, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(self.first(x).flatten(2).mT)
        for block in self.blocks:
            x = block(x)
        y: torch.Tensor = self.head(x.mean(1))
        return y


FIRST: dict[str, tuple[Callable[[], nn.Module], int, str]] = {
    "conv": (lambda: nn.Conv2d(3, 12, 3, stride=2), 12, "conv_backward"),
    "uneven": (lambda: nn.Conv2d(3, 12, 3, stride=(2, 1)), 12, "convolution_backward"),
    "norm": (lambda: nn.GroupNorm(2, 6), 6, "group_norm_backward"),
}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp": ("dp=2", {}),
    "zb-h1": ("pp=2,dp=2", {"microbatches": 2, "schedule": "zb-h1"}),
}


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def compiled(kind: str, mesh: str, plan: str, **options: Any) -> tuple[partc.Program, Any]:
    torch.manual_seed(0)
    made, width, _ = FIRST[kind]
    model = Net(made(), width).double()
    batch = (
        torch.randn(8, 6 if kind == "norm" else 3, 6, 6, dtype=torch.float64),
        torch.arange(8) % 4,
    )
    program = partc.compile(model, mesh, batch, loss=loss_of, plan=plan, **options)
    return program, (model, batch)


def call(source: str, name: str) -> str:
    """The printed call of a backward that gives no gradient of its input, in one line."""
    text = " ".join(source.split("\n        _, ")[1].split("\n")[:4])
    assert name in text, text
    return text


@pytest.mark.rows(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", FIRST)
def test_the_first_layer_gathers_nothing_in_its_backward(kind: str, layout: str) -> None:
    mesh, options = LAYOUTS[layout]
    program, (model, batch) = compiled(kind, mesh, "fsdp", **options)
    source = program.source(rank=0)
    assert "empty" in call(source, FIRST[kind][2])  # there, or before the first microbatch
    assert "empty((" in source
    starts = re.findall(r"gather_weights\([^)]*self\.first_weight", source)
    assert len(starts) == 1, source  # in the forward
    partc.verify(program, model, batch, loss=loss_of, timeout=patience()).check()


def test_a_weight_that_is_stored_whole_is_read_as_it_is() -> None:
    program, _ = compiled("conv", "dp=2", "ddp")
    text = call(program.source(rank=0), "first_bias = conv_backward")
    assert "self.first_weight" in text
    assert "d_x=False" in text
