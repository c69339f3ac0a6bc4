"""Lists of blocks may have any name, and any of them may run again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partc


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.up(x).relu())
        return out


class Net(nn.Module):
    """Blocks in a list of this name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.listed = name
        self.add_module(name, nn.ModuleList(Block() for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        blocks: Any = self.get_submodule(self.listed)
        for block in blocks:
            x = block(x)
        return x


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def check(model: nn.Module, mesh: str, how: dict[str, Any]) -> None:
    """Compile, and compare with the model."""
    batch = (torch.randn(8, 8),)
    program = partc.compile(model, mesh, batch, loss=loss_of, **how)
    partc.verify(program, model, batch, loss_of).check()


@pytest.mark.rows(1)
@pytest.mark.parametrize("name", ["step", "NetStep", "weights", "dp", "dp_rank", "SHARDS"])
def test_a_list_may_have_a_name_of_the_programs(name: str) -> None:
    check(Net(name), "dp=2", {"plan": "fsdp"})


@pytest.mark.rows(1)
@pytest.mark.parametrize("name", ["step", "NetStep", "losses", "begin", "stage0", "stages"])
def test_a_list_may_have_a_name_of_a_pipelines_programs(name: str) -> None:
    check(Net(name), "pp=2", {"plan": "ddp", "microbatches": 2})


@pytest.mark.exhaustive
@pytest.mark.parametrize("num", [2, 5])
def test_a_list_that_runs_twice_behind_another_layer(num: int) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                [nn.Linear(8, 8), nn.Sequential(*(Block() for _ in range(num)))]
            )

        def forward(self, x: Tensor) -> Tensor:
            first, blocks = self.layers
            out: Tensor = blocks(blocks(first(x)))
            return out

    check(Twice(), "dp=2", {"plan": "fsdp"})
    check(Twice(), "tp=2", {"plan": "megatron"})
