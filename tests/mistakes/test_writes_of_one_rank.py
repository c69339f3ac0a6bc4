"""What one rank alone writes to its parameters, gradients and optimizer: named at the next step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim.swa_utils import AveragedModel

import partc
from partc.errors import RunError
from partc.verification.processes import Processes
from tests.mistakes.things import Net, loss_of

pytestmark = pytest.mark.gloo
AT = 5  # a step before which ranks do not compare all that they hold


def trained(plan: str, name: str, mesh: str = "dp=2") -> str:
    """What nine steps end with, before one of which rank 0 alone does something."""
    model = partc.parallelize(Net(), mesh, loss=loss_of, plan=plan, batch="global")
    made: Any = torch.optim.Adam(model.parameters(), 0.1)
    numbers, average = torch.Generator().manual_seed(0), None
    try:
        for step in range(9):
            model.step(*torch.randn(2, 8, 4, generator=numbers))
            average = AveragedModel(model) if average is None else average
            if step == AT and dist.get_rank() == 0:
                does(name, model, made, average)
            if name != "no step" or step != AT or dist.get_rank():
                made.step()
            made.zero_grad()
    except RunError as error:
        return f"{step}: {error}"
    return "no error"


@torch.no_grad()
def does(name: str, model: Any, made: Any, average: Any) -> None:
    param = next(model.parameters())
    calls: dict[str, Callable[[], Any]] = {
        "no step": lambda: None,
        "weight": lambda: param.mul_(1.5),
        "data": lambda: param.data.clamp_(-0.01, 0.01),
        "view": lambda: param.view(-1).add_(0.1),
        "init": lambda: torch.nn.init.ones_(param),
        "loads": lambda: made.load_state_dict(copy.deepcopy(made.state_dict())),
        "average": lambda: average.update_parameters(model),
        "reads": lambda: (param.grad.clone().abs_(), param.detach().clone().mul_(2.0)),
        "to_local": lambda: param.to_local().mul_(1.0),
    }
    calls[name]()


WRITES = ["no step", "weight", "data", "view", "init"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [*WRITES, "average"])
def test_of_pieces(world: Processes, name: str) -> None:
    for said in world.run(trained, "fsdp", name, num=2):
        assert f"{AT + 1}: step: rank 1: another number of writes to sharded parameters" in said
        assert "none alone, behind `if rank == 0`" in said


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", WRITES)
def test_of_copies(world: Processes, name: str) -> None:
    for said in world.run(trained, "ddp", name, num=2):
        assert f"{AT + 1}: step: rank 1: another number of writes to parameters" in said


@pytest.mark.parametrize("plan", ["ddp", "fsdp"])
def test_a_load_of_an_optimizer(world: Processes, plan: str) -> None:
    for said in world.run(trained, plan, "loads", num=2):
        assert f"{AT + 1}: step: rank 1: another number of calls of optimizer.load_state_d" in said


@pytest.mark.rows(2)
@pytest.mark.parametrize(
    ("plan", "name"),
    [("ddp", "reads"), ("fsdp", "reads"), ("fsdp", "to_local"), ("ddp", "average")],
)
def test_what_one_rank_may_do(world: Processes, plan: str, name: str) -> None:
    """Copies are its own to write; so is a piece, by ``to_local``; so is its average of copies."""
    assert world.run(trained, plan, name, num=2) == ["no error"] * 2


def stepped(plan: str, how: str) -> str:
    """What nine steps of an optimizer by hand end with, whose rate is another on rank 1."""
    torch.manual_seed(0)
    model: Any = partc.parallelize(Net(), "dp=2", loss=loss_of, plan=plan, batch="global")
    numbers = torch.Generator().manual_seed(0)
    lr = 0.2 if dist.get_rank() == 1 and how != "alike" else 0.1
    rates = torch.tensor(lr)
    ways: dict[str, Callable[[Any], Any]] = {
        "alpha": lambda p: p.data.add_(p.grad, alpha=-lr),
        "alike": lambda p: p.data.add_(p.grad, alpha=-lr),
        "minus": lambda p: p.data.sub_(lr * p.grad),
        "no_grad": lambda p: p.sub_(p.grad * lr),
        "tensor": lambda p: p.add_(-rates * p.grad),
        "clipped": lambda p: p.add_((p.grad.clamp(-1, 1) / 3.0).mul(-lr)),
        "decay": lambda p: p.mul_(1 - lr),
    }
    try:
        for _ in range(9):
            model.step(*torch.randn(2, 8, 4, generator=numbers))
            with torch.no_grad():
                for p in model.parameters():
                    ways[how](p)
                    p.grad = None
            read = next(model.parameters()) * (1.0 + dist.get_rank())
            assert read.shape == (8, 4)
    except RunError as error:
        return str(error)
    return "no error"


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["alpha", "minus", "no_grad", "tensor", "clipped", "decay"])
def test_another_rate_of_an_optimizer_by_hand(world: Processes, how: str) -> None:
    for said in world.run(stepped, "fsdp", how, num=2):
        assert "step: rank 1: another factor of writes to sharded parameters" in said
        assert "(a learning rate, a norm to clip to) than rank 0" in said
        assert "takes the same lr on all ranks" in said


@pytest.mark.rows(2)
@pytest.mark.parametrize("plan", ["fsdp", "ddp", "zero1"])
def test_equal_rates_of_an_optimizer_by_hand(world: Processes, plan: str) -> None:
    assert world.run(stepped, plan, "alike", num=2) == ["no error"] * 2
