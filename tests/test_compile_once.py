"""Ranks of tests compile the same step once, and steps that differ each for itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from partc import api
from partc.errors import PartcError
from partc.program import Program
from partc.verification.processes import Processes
from tests.compile_once import each_compiles
from tests.program.families import close

pytestmark = pytest.mark.gloo


class Scaled(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.up, self.scales = nn.Linear(6, 8).double(), {"up": [scale]}

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.up(x) * self.scales["up"][0]
        return result


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return torch.as_tensor(model(x).square().mean())


@contextmanager
def counted() -> Iterator[list[api.Job]]:
    """The jobs for which this rank traces a model."""
    traced, seen = api.Job._traced, []

    def noted(job: api.Job, *args: Any, **named: Any) -> Any:
        seen.append(job)
        return traced(job, *args, **named)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(api.Job, "_traced", noted)
        yield seen


def compiled(model: nn.Module, x: Tensor) -> Program:
    return api.compile(model, "tp=2", (x,), loss=squares, plan="megatron")


def trained(alone: bool) -> int:
    """How often this rank traces the model, whose losses are right."""
    torch.manual_seed(0)
    model, batch = Scaled(2.0), torch.randn(8, 6, dtype=torch.float64)
    with counted() as seen, each_compiles() if alone else nullcontext():
        for x in (batch, batch[:4]):
            stage = compiled(model, x).module()
            close(stage.step(x), squares(model, x), "loss")
            close(stage.eval_step(x), squares(model, x), "loss in eval mode")
    return len(seen)


def test_ranks_compile_once(world: Processes) -> None:
    made, alone = world.run(trained, False, num=2), world.run(trained, True, num=2)
    assert alone[0] == alone[1] == sum(made) > 0


def of_rank() -> int:
    """A number that a list in a dict of the model has is another one on each rank."""
    with counted() as seen:
        compiled(Scaled(1.0 + dist.get_rank()), torch.zeros(8, 6, dtype=torch.float64))
    return len(seen)


def test_ranks_compile_what_is_their_own(world: Processes) -> None:
    assert world.run(of_rank, num=2) == [1, 1]


def refused() -> str:
    try:
        compiled(Scaled(1.0), torch.zeros(8, 5, dtype=torch.float64))
    except PartcError as error:
        return str(error)
    return ""


def test_ranks_fail_each_for_itself(world: Processes) -> None:
    first, second = world.run(refused, num=2)
    assert first == second != ""
