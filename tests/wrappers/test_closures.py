"""Models whose modules keep functions over other modules, as blocks of minGPT do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partc
from tests.mistakes.things import one_rank


class Block(nn.Module):
    """A product of two layers, called by a lambda over the dict of both."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.ModuleDict({"fc": nn.Linear(8, 16), "proj": nn.Linear(16, 8)})
        m = self.mlp
        self.mlpf: Callable[..., Tensor] = lambda x, *, last=m["proj"]: last(m["fc"](x).relu())

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.mlpf(x)
        return result


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    with one_rank():
        yield


def losses(model: nn.Module, batches: list[Tensor]) -> list[float]:
    """Of a training in one process, or of one with a stage."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.5), []
    for x in batches:
        optimizer.zero_grad()
        loss = loss_of(model, x) if isinstance(model, Block) else model(x)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_a_lambda_over_a_module_is_over_that_of_the_stage() -> None:
    batches = [torch.randn(num, 8) for num in (4, 4, 6, 6)]  # the second shape compiles a twin
    torch.manual_seed(0)
    wanted = losses(Block(), batches)
    torch.manual_seed(0)
    model = partc.parallelize(Block(), "dp=1", loss=loss_of, plan="ddp")
    assert losses(model, batches) == pytest.approx(wanted)
    assert model._stage is not None
    twin: Any = model._stage.like_model
    assert twin.mlpf.__closure__[0].cell_contents is twin.mlp
    assert twin.mlpf.__kwdefaults__["last"] is twin.mlp["proj"]
