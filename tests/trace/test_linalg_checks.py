"""Programs raise where routines of torch.linalg do: their checks are part of what they give."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import partc
from partc.errors import RunError


class Solving(nn.Module):
    """A layer, and a routine on the matrices that it makes."""

    def __init__(self, routine: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.routine = routine

    def forward(self, x: Tensor) -> Tensor:
        return self.routine(self.layer(x) * x[:, :1, :1])


ROUTINES: dict[str, Callable[[Tensor], Tensor]] = {
    "cholesky": lambda y: torch.linalg.cholesky(y @ y.mT),
    "inv": torch.linalg.inv,
    "solve": lambda y: torch.linalg.solve(y, torch.ones(4, 2)),
    "lu_factor": lambda y: torch.linalg.lu_factor(y)[0],
}


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().sum()
    return loss


@pytest.mark.rows(1)
@pytest.mark.parametrize("name", ROUTINES)
def test_a_matrix_without_a_result_is_refused_as_without_partc(name: str) -> None:
    torch.manual_seed(0)
    model, good = Solving(ROUTINES[name]), torch.randn(4, 4, 4)
    program = partc.compile(model, "dp=2", (good,), loss=loss_of, plan="ddp")
    partc.verify(program, model, (good,), loss=loss_of).check()
    alone = partc.compile(model, "dp=1", (good,), loss=loss_of, plan="ddp").module()
    alone.step(good)
    bad = good.clone()
    bad[2] = 0
    with pytest.raises(RuntimeError, match=f"linalg.{name}"):
        loss_of(model, bad)
    with pytest.raises(RunError, match=f"linalg.{name}"):
        alone.step(bad)
