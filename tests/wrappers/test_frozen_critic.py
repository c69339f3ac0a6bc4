"""A generator that learns through a frozen critic is told of no training that goes wrong."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partc
from partc.verification.processes import Processes

NOISE = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def made() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    maker, critic = nn.Linear(3, 6).double(), nn.Sequential(nn.Linear(6, 4), nn.Tanh()).double()
    return maker, critic


def losses(maker: Any, critic: Any) -> list[Tensor]:
    optimizer, found = torch.optim.SGD(maker.parameters(), lr=0.1), []
    critic.requires_grad_(False)
    for _ in range(2):
        optimizer.zero_grad()
        loss = critic(maker(NOISE)).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return found


def toggled() -> None:
    wanted = losses(*made())
    two = [partc.parallelize(each, "dp=2", plan="ddp", batch="global") for each in made()]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*trains nothing")
        torch.testing.assert_close(losses(*two), wanted)


@pytest.mark.gloo
def test_a_critic_that_is_frozen_gives_gradients_of_its_input(world: Processes) -> None:
    world.run(toggled, num=2)
