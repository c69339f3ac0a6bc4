"""Gradients that one rank clears, sets or changes before its optimizer steps: who did is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import partc
from partc.errors import RunError
from partc.verification.processes import Processes
from tests.mistakes.things import Net, loss_of

pytestmark = pytest.mark.gloo


def cleared(param: Any) -> None:
    param.grad = None


def replaced(param: Any) -> None:
    param.grad = torch.zeros_like(param)


def scaled(param: Any) -> None:
    param.grad.mul_(0.5)


DEEDS: dict[str, tuple[Callable[[Any], None], str]] = {
    "cleared": (cleared, "was None"),
    "replaced": (replaced, "was set by the script"),
    "scaled": (scaled, "was changed in place 1 times"),
}


def trained(plan: str, deed: str, mesh: str, everywhere: bool) -> str:
    """What some steps end with, where the last rank does a deed behind the fifth."""
    model: Any = partc.parallelize(Net(), mesh, loss=loss_of, plan=plan, batch="global")
    optimizer: Any = torch.optim.AdamW(model.parameters(), 0.1)
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    numbers = torch.Generator().manual_seed(0)
    try:
        for step in range(8):  # between the comparisons of weights
            x, y = torch.randn(2, 8, 4, generator=numbers)
            optimizer.zero_grad()
            model.step(x, y)
            param = [*model.parameters()][-1]
            if step == 5 and deed and (everywhere or rank == last):
                DEEDS[deed][0](param)
            nn.utils.clip_grad_value_(model.parameters(), 1.0)
            optimizer.step()
    except RunError as error:
        return f"step {step}: {error}"
    return "alike"


@pytest.mark.rows(3)
@pytest.mark.parametrize("deed", DEEDS)
@pytest.mark.parametrize(
    ("plan", "mesh"),
    [("ddp", "dp=2"), ("fsdp", "dp=2"), ("megatron", "tp=2"), ("fsdp", "pp=2,dp=2")],
)
def test_what_one_rank_does_to_a_gradient_is_refused_at_the_next_step(
    world: Processes, plan: str, mesh: str, deed: str
) -> None:
    num = 4 if "pp" in mesh else 2
    assert world.run(trained, plan, deed, mesh, True, num=num) == ["alike"] * num
    for said in world.run(trained, plan, deed, mesh, False, num=num):
        assert said.startswith("step 6: step: rank"), said
        assert "the gradient of down.bias in optimizer.step() " in said
        assert DEEDS[deed][1] in said
        assert "alike on all ranks" in said
