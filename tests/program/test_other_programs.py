"""Ranks that were given other models, losses, plans or rows are told which, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import partc
from partc.errors import PartcError
from partc.verification.processes import Processes
from tests.mistakes.things import Net, batch_of, compiled, loss_of


def other_loss(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    return nn.functional.l1_loss(model(x), target)


def twice(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    return 2 * loss_of(model, x, target)


def wider() -> Net:
    model = Net()
    model.up, model.down = nn.Linear(4, 16), nn.Linear(16, 4)
    return model


def frozen() -> Net:
    model = Net()
    model.up.requires_grad_(False)
    return model


def same_name() -> Any:
    def loss_of(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
        return twice(model, x, target)

    loss_of.__qualname__ = "loss_of"
    return loss_of


OF_RANK_1: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "loss": (lambda: {"loss": other_loss}, "rank 1: the loss is other_loss, and loss_of on rank 0"),
    "model": (lambda: {"model": nn.Sequential(nn.Linear(4, 4))}, "a Sequential, and a Net on rank"),
    "width": (lambda: {"model": wider()}, "[8, 4] on rank 0 (and 2 more)"),
    "frozen": (lambda: {"model": frozen()}, "up.bias is frozen, and trained on rank 0"),
    "plan": (lambda: {"plan": "fsdp"}, """the plan has `preset = "fsdp"`, and `preset = "ddp"`"""),
    "microbatches": (lambda: {"microbatches": 2}, "the plan has `microbatches = 2`, and `micro"),
    "code": (lambda: {"loss": same_name()}, "and `"),
}


def refusals() -> dict[str, str]:
    """What this rank is told, by what differs on rank 1."""
    told = {}
    for kind, (changed, _) in OF_RANK_1.items():
        program = compiled(**(changed() if dist.get_rank() else {}))
        try:
            program.module()
        except PartcError as error:
            told[kind] = str(error)
    return told


@pytest.mark.gloo
def test_ranks_with_other_programs_are_told_in_what(world: Processes) -> None:
    for told in world.run(refusals, num=2):
        for kind, (_, words) in OF_RANK_1.items():
            assert words in told[kind], told[kind]
            assert "Build the same model, loss and options on every rank" in told[kind]


def shared_rows() -> str:
    """What is said where ranks apart along ``tp`` alone are given rows of their own."""
    model = partc.parallelize(Net(), "dp=1,tp=2", loss=loss_of, plan="megatron")
    x, y = batch_of()
    try:
        model.step(x + dist.get_rank() + torch.zeros(()), y)
    except PartcError as error:
        return str(error)
    return ""


@pytest.mark.gloo
def test_ranks_that_share_rows_are_told_of_the_sampler(world: Processes) -> None:
    for told in world.run(shared_rows, num=2):
        assert "num_replicas=model.data_world, rank=model.data_rank" in told
        assert 'batch="local"' not in told
