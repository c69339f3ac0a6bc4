"""Habits of DDP, FSDP and Accelerate: what a script is told to write in their place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import partc
from partc.errors import RunError, UsageError
from partc.verification.processes import Processes
from tests.compile_once import each_compiles
from tests.mistakes.things import Net, loss_of

X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3


def test_methods_of_other_wrappers_are_told_before_the_first_step_too() -> None:
    model: Any = partc.parallelize(Net(), "dp=1", plan="ddp", loss=loss_of)
    words = {"register_comm_hook": "[compress]", "join_hook": "partial=", "join": "partial="}
    for name, word in words.items():
        assert not hasattr(model, name)
        with pytest.raises(AttributeError, match=r"no such method") as caught:
            getattr(model, name)
        assert word in str(caught.value)


def test_a_precision_of_fsdp_is_autocast() -> None:
    options: Any = {"mp_policy": None}
    with pytest.raises(UsageError, match=r"autocast.* around the step says what is"):
        partc.parallelize(Net(), "dp=1", plan="ddp", **options)


def weighted() -> str:
    """What is said where each rank has counted its own class weights."""
    weights = torch.full((3,), 1.0 + dist.get_rank())

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model(x), y, weight=weights)

    torch.manual_seed(0)
    model: Any = partc.parallelize(nn.Linear(4, 3), "dp=2", plan="ddp", loss=loss, batch="global")
    with each_compiles(), pytest.raises(RunError) as caught:
        model.step(X, Y)
    return str(caught.value)


@pytest.mark.exhaustive
@pytest.mark.gloo
def test_class_weights_of_one_rank_are_no_buffers(world: Processes) -> None:
    for said in world.run(weighted, num=2):
        assert "another constant_0, a tensor that the loss or the model takes from outside" in said
        assert "Compute tensors that a loss or a model takes from outside (class weights" in said
        assert "load_full" not in said


def by_gradient() -> float:
    """How far an input's gradient, taken as the warning says, is from that of one process."""
    torch.manual_seed(0)
    model, plain = Net().double(), Net().double()
    plain.load_state_dict(model.state_dict())
    x, y = torch.randn(2, 8, 4, dtype=torch.float64)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Any:
        x = x.detach().requires_grad_()
        found = loss_of(model, x, y)
        return found, {"grad": torch.autograd.grad(found, x, retain_graph=True)[0]}

    stage: Any = partc.parallelize(model, "dp=2", plan="fsdp", loss=loss, batch="global")
    _, extras = stage.step(x, y)
    x.requires_grad_()
    loss_of(plain, x, y).backward()
    assert x.grad is not None
    far: float = (extras["grad"] - x.grad).abs().max().item()
    return far


@pytest.mark.gloo
def test_a_gradient_of_an_input_is_a_result_of_the_loss(world: Processes) -> None:
    assert max(world.run(by_gradient, num=2)) < 1e-15
