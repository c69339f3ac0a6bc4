"""Factors of a loss that differ between ranks, and what is made of gradients, are refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import partc
from partc.errors import RunError
from partc.verification.processes import Processes
from tests.mistakes.things import Net, batch_of, loss_of, one_rank

X, Y = batch_of()


def stage_of(plan: str = "ddp", mesh: str = "dp=2") -> Any:
    torch.manual_seed(0)
    allowed = 'allow = ["local_steps"]\n[local_steps]\nperiod = 4\n' if "island" in mesh else ""
    plan = f'preset = "{plan}"\n{allowed}'
    return partc.compile(Net(), mesh, (X, Y), loss=loss_of, plan=plan).module()


TRAIN: dict[str, Callable[[Any, float], Any]] = {
    "loss.backward()": lambda stage, factor: (stage(X, Y) * factor).backward(),
    "step(scale=...)": lambda stage, factor: stage.step(X, Y, scale=factor),
}


def refused(plan: str, call: str) -> None:
    stage, rank = stage_of(plan), dist.get_rank()
    for _ in range(2):  # a mistake that is caught is told again
        with pytest.raises(RunError, match="rank 1 multiplies the loss by 2, and rank 0 by 1") as e:
            TRAIN[call](stage, 1.0 + rank)
        assert call in str(e.value)
    TRAIN[call](stage, 0.5)


@pytest.mark.exhaustive
@pytest.mark.gloo
@pytest.mark.parametrize("plan", ["ddp", "fsdp"])
@pytest.mark.parametrize("call", TRAIN)
def test_a_factor_of_one_rank_is_refused(world: Processes, plan: str, call: str) -> None:
    world.run(refused, plan, call, num=2)


def of_islands() -> None:
    stage = stage_of(mesh="island=2")
    x = X + dist.get_rank()
    (stage(x, Y) * (1.0 + dist.get_rank())).backward()


@pytest.mark.gloo
def test_islands_have_factors_of_their_own(world: Processes) -> None:
    world.run(of_islands, num=2)


def refused_batches() -> list[str]:
    stage, told = stage_of(), []
    for _ in range(3):
        with pytest.raises(RunError) as error:
            stage.step(X + dist.get_rank(), Y)
        told.append(str(error.value))
    stage.step(X, Y)
    return told


@pytest.mark.gloo
def test_a_batch_that_was_refused_is_refused_again(world: Processes) -> None:
    for told in world.run(refused_batches, num=2):
        assert all("rank 1: another x than rank 0" in each for each in told)


def test_a_graph_of_gradients_is_refused() -> None:
    with one_rank(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of cycles
        stage = stage_of(mesh="dp=1")
        params = list(stage.parameters())
        with pytest.raises(RunError, match="create_graph"):
            torch.autograd.grad(stage(X, Y), params, create_graph=True)
        with pytest.raises(RunError, match="create_graph"):
            stage(X, Y).backward(create_graph=True)
        stage(X, Y).backward()


def test_results_of_eval_mode_are_no_part_of_a_loss() -> None:
    with one_rank():
        stage = stage_of(mesh="dp=1")
        result = stage.eval()(X)
        stage.train()
        for loss in (
            stage(X, Y) + F.mse_loss(result, Y), 0.1 * F.mse_loss(result, Y) + stage(X, Y),
        ):  # fmt: skip
            with pytest.raises(RunError, match="in eval mode"):
                loss.backward()
        head = nn.Linear(4, 1)
        (stage(X, Y) + head(result).mean()).backward()
        assert head.weight.grad is not None


def test_a_preset_without_an_axis_is_told() -> None:
    plan = 'preset = "fsdp"\nallow = ["local_steps"]\n[local_steps]\nperiod = 4\n'
    with pytest.warns(UserWarning, match="preset says nothing here: the mesh island=2 has no axis"):
        partc.compile(Net(), "island=2", (X, Y), loss=loss_of, plan=plan)
