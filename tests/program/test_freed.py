"""A stage that a script lets go: its tensors are freed, on real gloo processes."""

from __future__ import annotations

import gc
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

import partc
from partc.verification.processes import Processes

WIDTH = 8


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return torch.as_tensor(model(x).square().mean())


def let_go(plan: str, by_step: bool) -> int:
    """How many parameters and gradients of a stage are left behind it."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).double()
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    stage = partc.compile(model, "dp=2", (x,), loss=squares, plan=plan).module()
    optimizer = torch.optim.AdamW(stage.parameters())
    for _ in range(2):
        if by_step:
            stage.step(x)
        else:
            stage(x).backward()
        optimizer.step()
    held = [each for param in stage.parameters() for each in (param, param.grad)]
    known = [ref(each) for each in held if each is not None]
    del stage, optimizer, held
    gc.collect()
    return sum(each() is not None for each in known)


@pytest.mark.rows(2)
@pytest.mark.gloo
@pytest.mark.parametrize("by_step", [True, False], ids=["step", "backward"])
@pytest.mark.parametrize("plan", ["ddp", "fsdp"])
def test_nothing_of_it_stays(plan: str, by_step: bool, world: Processes) -> None:
    assert world.run(let_go, plan, by_step, num=2) == [0, 0]
