"""Losses that add a number to a mean of the batch: `1 - likeness`, in microbatches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import partc
from partc.passes.shard.microbatches import WholeBatchError

Loss = Callable[[nn.Module, Tensor], Tensor]

LOSSES: dict[str, Loss] = {
    "1 - mean": lambda m, x: 1 - m(x).mean(),
    "mean * 2 - 1": lambda m, x: m(x).mean() * 2 - 1,
    "mean + 0.1": lambda m, x: m(x).mean() + 0.1,
    "1 - means of columns": lambda m, x: (1 - m(x).mean(0)).sum(),
    "1 - mean, narrow": lambda m, x: 1 - m(x).mean().bfloat16(),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


@pytest.mark.rows(2)
@pytest.mark.parametrize("mesh", ["dp=2", "pp=2"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_number_counts_once(name: str, mesh: str) -> None:
    made, batch = model(), (torch.randn(8, 4),)
    program = partc.compile(made, mesh, batch, loss=LOSSES[name], plan="ddp", microbatches=4)
    partc.verify(program, made, batch, loss=LOSSES[name]).check()
    again = partc.compile(made, mesh, batch, loss=LOSSES[name], plan=program.plan)
    assert again.source(rank=0) == program.source(rank=0)


def test_without_microbatches_it_stays_a_number() -> None:
    batch = (torch.randn(8, 4),)
    program = partc.compile(model(), "dp=2", batch, loss=LOSSES["1 - mean"], plan="ddp")
    assert "1 - " in program.source(rank=0)


def test_a_number_that_its_dtype_would_round_is_left() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        result: Tensor = model(x).mean().bfloat16() + 0.1
        return result

    with pytest.raises(WholeBatchError, match="needs the whole batch"):
        partc.compile(model(), "dp=2", (torch.randn(8, 4),), loss=loss, plan="ddp", microbatches=2)
