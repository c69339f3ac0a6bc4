"""Which optimizers may step on pieces is found by trying them, whatever class they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from partc.program.optimizer.try_optimizer import is_elementwise, is_per_tensor
from tests.program.training import MAKERS, Params

ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "RMSprop", "ASGD", "Adadelta",
    "Rprop",
)  # fmt: skip


class Scaled(torch.optim.SGD):
    """As LARS: each step is as long as the parameter."""

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(p.detach().norm())
        return super().step()


class Clipped(torch.optim.SGD):
    """Clips all gradients by their norm."""

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 0.1)
        return super().step()


def params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))]


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize(
    "options", [{}, {"weight_decay": 0.1, "maximize": True}, {"foreach": True}]
)
def test_elementwise_optimizers_of_torch(name: str, options: dict[str, Any]) -> None:
    if name == "Rprop" and "weight_decay" in options:
        options = {"maximize": True}
    optimizer = getattr(torch.optim, name)(params(), **options)
    assert is_elementwise(optimizer)
    assert is_per_tensor(optimizer)
    assert all(torch.equal(p, torch.ones(4, 4)) for p in optimizer.param_groups[0]["params"])
    assert all(p.grad is None for p in optimizer.param_groups[0]["params"])


PER_TENSOR: dict[str, Callable[[Params], torch.optim.Optimizer]] = {
    "Muon": MAKERS["Muon"],
    "Adafactor": MAKERS["Adafactor"],
    "Whitened": MAKERS["Whitened"],
    "LARS": lambda given: Scaled(given, lr=0.1),
}


@pytest.mark.parametrize("name", PER_TENSOR)
def test_optimizers_of_whole_tensors(name: str) -> None:
    optimizer = PER_TENSOR[name](params())
    assert not is_elementwise(optimizer)
    assert is_per_tensor(optimizer)


def test_optimizers_of_the_whole_model() -> None:
    for optimizer in (MAKERS["LBFGS"](params()), Clipped(params(), lr=0.1)):
        assert not is_elementwise(optimizer)
        assert not is_per_tensor(optimizer)


def test_a_rate_of_0_does_not_hide_what_an_optimizer_does() -> None:
    """Schedules begin there."""
    one, other = ({"params": [p], "lr": 0.0} for p in params())
    mixed = Scaled([one, other])
    torch.optim.lr_scheduler.LambdaLR(mixed, lambda step: 0.0)
    assert not is_elementwise(mixed)
