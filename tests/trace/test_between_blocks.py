"""What a model computes in its loop over blocks, outside of them, is printed once as well."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partc

FEW, MANY = 6, 8
WRAPPED = 2  # lines that a number's second digit makes too long


def mlp() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))


class Residual(nn.Module):
    """The sum stands in the loop; the last turn is followed by another one."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(mlp() for _ in range(num))
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        first = x
        for block in self.blocks:
            x = x + block(x)
        x = x + first
        y: Tensor = self.out(x)
        return y


class Pairs(nn.Module):
    """A list of lists, and a module around it."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.body = nn.Module()
        self.body.layers = nn.ModuleList(nn.ModuleList([mlp(), mlp()]) for _ in range(num))
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        layers: Any = self.body.layers
        for one, other in layers:
            x = one(x) + x
            x = other(x) + x
        y: Tensor = self.out(x)
        return y


class Before(nn.Module):
    """A turn begins outside of its block."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(mlp() for _ in range(num))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            half = torch.tanh(x)
            x = block(half)
        return x


class Uneven(Residual):
    """One turn does something else."""

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            y = block(x)
            x = x - y if i == 3 else x + y
        z: Tensor = self.out(x)
        return z


def squared(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).pow(2).mean()
    return loss


def num_lines(kind: type[nn.Module], num: int, mesh: Any, plan: str, **options: Any) -> int:
    """The lines of a program; that of a deep model computes what the model does."""
    torch.manual_seed(0)
    model, batch = kind(num), (torch.randn(16, 16),)
    program = partc.compile(model, mesh, batch, loss=squared, plan=plan, **options)
    if num > FEW:
        partc.verify(program, model, batch, loss=squared).check()
    return program.source().count("\n")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "mesh", "plan"),
    [
        (Residual, {}, "ddp"), (Before, {}, "ddp"), (Before, "dp=2,tp=2", "fsdp+megatron"),
        (Pairs, "dp=2,tp=2", "fsdp+megatron"),
    ],
)  # fmt: skip
def test_deeper_models_are_as_long(kind: type[nn.Module], mesh: Any, plan: str) -> None:
    assert abs(num_lines(kind, FEW, mesh, plan) - num_lines(kind, MANY, mesh, plan)) <= WRAPPED


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", [Residual, Pairs])
def test_stages_of_deeper_models_are_as_long(kind: type[nn.Module]) -> None:
    """Of these blocks none can be left out before the model is traced."""
    few, many = (num_lines(kind, num, "pp=2", "ddp", microbatches=2) for num in (FEW, MANY))
    assert abs(few - many) <= WRAPPED


@pytest.mark.rows(1)
@pytest.mark.parametrize(("mesh", "options"), [({}, {}), ("pp=2", {"microbatches": 2})])
def test_turns_that_differ_stay_apart(mesh: Any, options: dict[str, Any]) -> None:
    assert num_lines(Uneven, MANY, mesh, "ddp", **options)


class Skips(nn.Module):
    """What the blocks of one list give, those of another read, the last one first; both share an
    activation.
    """

    def __init__(self, num: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(16, 16) for _ in range(num))
        self.up = nn.ModuleList(nn.Linear(16, 16) for _ in range(num))
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        made = []
        for layer in self.down:
            x = self.act(layer(x))
            made.append(x)
        for layer in self.up:
            x = self.act(layer(x) + made.pop())
        return x


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mesh", "options"), [({}, {}), ("pp=2", {"microbatches": 2})])
def test_blocks_that_others_read_are_as_long(mesh: Any, options: dict[str, Any]) -> None:
    """In a pipeline each of them is sent to the next stage."""
    few, many = (num_lines(Skips, num, mesh, "ddp", **options) for num in (FEW, MANY))
    assert abs(few - many) <= 3 * WRAPPED  # names of what is sent
