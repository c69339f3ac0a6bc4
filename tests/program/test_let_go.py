"""A model that no variable holds once its stage is made: further programs, on gloo processes."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
from torch import Tensor, nn

import partc
from partc.verification.processes import Processes
from tests.program.families import ROWS, compare_step

WIDTH = 4


class Kept(nn.Module):
    """Keeps tensors with a gradient function: a weight in two parts, what its last forward gave."""

    def __init__(self) -> None:
        super().__init__()
        self.up = normed(nn.Linear(WIDTH, WIDTH))
        self.seen: dict[str, Tensor] = {"last": self.up(torch.ones(1, WIDTH))}

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.up(x)
        return result


def normed(layer: nn.Linear) -> nn.Module:
    """With ``weight_norm`` as scripts still have it, which sets the weight in each forward."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        made: nn.Module = nn.utils.weight_norm(layer)
    return made


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return torch.as_tensor(model(x).square().mean())


def in_no_variable() -> None:
    model, x = Kept().double(), torch.randn(ROWS, WIDTH, dtype=torch.float64)
    stage = partc.compile(Kept().double(), "dp=2", (x,), loss=squares, plan="ddp").module()
    stage.load_full(model.state_dict())
    gc.collect()
    for rows in (ROWS, 2):  # the second is another program, of the copy
        compare_step(stage, model, stage.step(x[:rows]), squares(model, x[:rows]))


@pytest.mark.gloo
def test_it_has_a_copy_though_it_keeps_what_it_computed(world: Processes) -> None:
    world.run(in_no_variable, num=2)
