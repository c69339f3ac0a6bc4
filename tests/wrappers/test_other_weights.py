"""A call of the model with other tensors than its own: a program computes with those it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import partc
from partc.errors import RunError
from tests.mistakes.things import one_rank

X = torch.ones(4, 8)


class Scaled(nn.Module):
    """A parameter of its own, beside those of a part."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(8, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x) * self.scale
        return result


def before() -> Any:
    return partc.parallelize(Scaled(), {}, plan="ddp")


def evaluated() -> Any:
    return before().eval()


def behind() -> Any:
    model = before()
    model(X).sum().backward()
    return model


def stage() -> Any:
    return behind()._stage


@pytest.mark.rows(4)
@one_rank()
@pytest.mark.parametrize("names", ["scale", "layer.weight", "layer.bias"])
@pytest.mark.parametrize("made", [before, evaluated, behind, stage])
def test_functional_call_is_refused(made: Callable[[], Any], names: str) -> None:
    model = made()
    given = {n: p * 0.5 for n, p in model.named_parameters() if n == names}
    with pytest.raises(RunError, match="a program computes with its own weights"):
        functional_call(model, given, (X,))
    assert isinstance(dict(model.named_parameters())[names], nn.Parameter)
    model(X)
