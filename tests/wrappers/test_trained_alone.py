"""A model that the script trains by a method or a part, and never calls, is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

import partc
from partc.errors import RunError
from partc.verification.processes import Processes

X = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = nn.Linear(6, 4), nn.Linear(6, 1)

    def value(self, x: Tensor) -> Tensor:
        found: Tensor = self.critic(x)
        return found

    def loss(self, x: Tensor) -> Tensor:
        loss: Tensor = self.actor(x).square().mean() + self.value(x).square().mean()
        return loss


def agent() -> Agent:
    torch.manual_seed(0)
    return Agent().double()


def parallel(model: nn.Module, **given: Any) -> Any:
    return partc.parallelize(model, "dp=2", plan="fsdp", batch="global", **given)


def by_optimizer(model: Any, loss_of: Callable[[Any], Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model).backward()
    optimizer.step()


def by_hand(model: Any, loss_of: Callable[[Any], Tensor]) -> None:
    for _ in range(2):
        loss_of(model).backward()
        for param in model.parameters():
            if param.grad is not None:
                param.data.add_(param.grad, alpha=-0.1)


def alone(train: Callable[..., None]) -> None:
    for loss_of in (lambda m: m.loss(X), lambda m: m.actor(X).square().mean()):
        model = parallel(agent())
        with torch.no_grad():
            model.value(X)  # which trains nothing
        with pytest.raises(RunError, match=r"has a gradient, and the model was never called"):
            train(model, loss_of)


@pytest.mark.gloo
@pytest.mark.parametrize("train", [by_optimizer, by_hand])
def test_a_model_that_is_never_called_is_refused(
    train: Callable[..., None], world: Processes
) -> None:
    world.run(alone, train, num=2)


def by_a_loss() -> None:
    """Gradients of before the model was wrapped are nobody's mistake."""
    one, mine = agent(), agent()
    for each in (one, mine):
        each.loss(2 * X).backward()
    model = parallel(mine, loss=lambda m, x: m.loss(x))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (one, model)]
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        wanted = one.loss(X)
        wanted.backward()
        torch.testing.assert_close(model.step(X), wanted.detach())
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.gloo
def test_a_loss_may_call_methods(world: Processes) -> None:
    world.run(by_a_loss, num=2)


def one_rank() -> float:
    dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    model = partc.parallelize(agent(), "dp=1", plan="ddp")
    by_optimizer(model, lambda m: m.loss(X))
    found = float(model.loss(X).detach())
    dist.destroy_process_group()
    return found


def test_one_rank_trains_the_model_as_it_is() -> None:
    one = agent()
    by_optimizer(one, lambda m: m.loss(X))
    assert one_rank() == float(one.loss(X).detach())
