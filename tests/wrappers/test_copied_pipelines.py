"""A mean of weights by a deep copy of a pipeline, with frozen parameters and buffers of its own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partc
from partc.verification.processes import Processes

X = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Tower(nn.Module):
    """Frozen places in front of blocks, and a count behind them that a step writes."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.ones(6), requires_grad=False)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.places
        for block in self.blocks:
            x = block(x).tanh()
        result: Tensor = self.norm(x)
        return result


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = (model(x) - x).square().mean()
    return loss


def made() -> nn.Module:
    torch.manual_seed(0)
    return Tower().double()


def averaged(model: Any, step: Any) -> tuple[Any, list[float]]:
    """A script of diffusion models: copy, freeze the copy, move it by names after each step."""
    losses, optimizer = [], torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=0.1
    )  # fmt: skip
    mean = copy.deepcopy(model)
    for param in mean.parameters():
        param.requires_grad_(False)
    for _ in range(2):
        optimizer.zero_grad()
        losses.append(float(step().detach()))
        optimizer.step()
        own = dict(model.named_parameters())
        with torch.no_grad():
            for name, param in mean.named_parameters():
                param.mul_(0.9).add_(own[name], alpha=0.1)
    return mean, losses


def copied(asks: bool) -> None:
    alone = made()

    def by_backward() -> Tensor:
        loss = mean_square(alone, X)
        loss.backward()
        return loss

    mean, wanted = averaged(alone, by_backward)
    model = partc.parallelize(made(), "pp=2", plan="ddp", loss=mean_square, microbatches=1)
    model.compile_for(X)
    if asks:  # of each tensor, wherever it lies, as libraries do
        assert [*model.blocks.state_dict()]
        assert [*model.norm.state_dict()]
    found, losses = averaged(model, lambda: model.step(X))
    torch.testing.assert_close(losses, wanted)
    whole = found.full_state_dict()
    for name, tensor in mean.named_parameters():
        torch.testing.assert_close(whole[name], tensor.detach())


@pytest.mark.gloo
@pytest.mark.parametrize("asks", [False, True])
def test_a_copy_of_a_pipeline_averages_as_one_process_does(asks: bool, world: Processes) -> None:
    world.run(copied, asks, num=2)
