"""A buffer whose value decided what a program does keeps that value, or no step runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partc
from partc.errors import RunError
from partc.program.step.decided import ALWAYS
from partc.verification.processes import Processes

pytestmark = pytest.mark.gloo


class Selecting(nn.Module):
    """Gives some columns of a layer's result, as a buffer says."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.keep = nn.Linear(8, 4), nn.Buffer(torch.tensor([True, False, True, True]))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y[:, self.keep]


def square(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def model_of() -> Selecting:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Selecting()


def saved(path: Path) -> Path:
    partc.compile(model_of(), "dp=4", (torch.ones(4, 8),), loss=square, plan="ddp").save(path)
    return path


def refused(stage: Any, x: Tensor) -> None:
    with pytest.raises(RunError, match="keep: this buffer has another value than when the step"):
        stage.step(x)


def guarded(path: Path) -> None:
    model, x = model_of(), torch.ones(4, 8)
    stage: Any = partc.load(path, model).module()
    expected = square(model, x).detach()
    torch.testing.assert_close(stage.step(x), expected)
    other = model_of()
    other.keep[0] = False
    stage.load_full(other)
    refused(stage, x)
    stage.load_full(model)
    for _ in range(ALWAYS + 1):
        torch.testing.assert_close(stage.step(x), expected)
    stage.load_state_dict(other.state_dict())  # behind the first steps a write is noticed
    refused(stage, x)


def test_another_value_is_refused(world: Processes, tmp_path: Path) -> None:
    world.run(guarded, saved(tmp_path / "build"))
