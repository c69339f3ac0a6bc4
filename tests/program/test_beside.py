"""Criteria with parameters of their own, beside a stage, in the same optimizer and in another."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.errors import RunError
from partc.verification.processes import Processes

pytestmark = pytest.mark.gloo
ROWS = 8


class Head(nn.Module):
    """Scores of classes by learned centers, and a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.linspace(-1, 1, 20, dtype=torch.float64).view(5, 4))
        self.temperature = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(x @ self.centers.T * self.temperature, target)


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def trained(
    model: nn.Module, piece: slice, *, alone: bool, add_up: Callable[[Tensor], None] | None = None
) -> Tensor:
    """The centers behind three steps."""
    head, drawn = Head(), torch.Generator().manual_seed(1)
    of_model, of_head = [*model.parameters()], [*head.parameters()]
    groups = [of_model, of_head] if alone else [of_model + of_head]
    optimizers = [torch.optim.SGD(each, 0.1) for each in groups]
    for _ in range(3):
        x = torch.randn(ROWS, 8, generator=drawn, dtype=torch.float64)[piece]
        target = torch.randint(5, (ROWS,), generator=drawn)[piece]
        for each in optimizers:
            each.zero_grad()
        head(model(x), target).backward()
        for param in head.parameters() if add_up else ():
            assert add_up is not None
            assert param.grad is not None
            add_up(param.grad)
        for each in optimizers:
            each.step()
    return head.centers.detach()


def mean(grad: Tensor) -> None:
    dist.all_reduce(grad)
    grad /= dist.get_world_size()


def own_rows() -> slice:
    return slice(dist.get_rank() * ROWS // 2, (dist.get_rank() + 1) * ROWS // 2)


def left_to_each_rank() -> None:
    model = partc.parallelize(encoder(), "dp=2", plan="fsdp")
    with pytest.raises(RunError, match=r"another tensor of shape \[5, 4\] in SGD, none of the"):
        trained(model, own_rows(), alone=False)
    model = partc.parallelize(encoder(), "dp=2", plan="fsdp")
    with pytest.warns(UserWarning, match=r"another tensor of shape \[5, 4\].* this is right"):
        trained(model, own_rows(), alone=True)


def test_a_criterion_that_each_rank_trains_by_its_own_rows_is_named(world: Processes) -> None:
    world.run(left_to_each_rank, num=2)


def alike() -> None:
    expected = trained(encoder(), slice(None), alone=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "partc: the script keeps")
        for alone in (False, True):
            model = partc.parallelize(encoder(), "dp=2", plan="ddp")
            found = trained(model, own_rows(), alone=alone, add_up=mean)
            torch.testing.assert_close(found, expected)
            model = partc.parallelize(encoder(), "dp=2", plan="ddp", batch="global")
            torch.testing.assert_close(trained(model, slice(None), alone=alone), expected)
            model = partc.parallelize(encoder(), "tp=2", plan="megatron")
            torch.testing.assert_close(trained(model, slice(None), alone=alone), expected)


@pytest.mark.exhaustive
def test_a_criterion_whose_ranks_train_alike_is_right(world: Processes) -> None:
    world.run(alike, num=2)
