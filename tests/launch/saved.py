"""Small programs that tests of launch and doctor compile, each once for a process."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

import partc


class SAVED(nn.Sequential):
    """Two equal blocks, so that it can be a pipeline."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2)))


def loss_of(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), target)


@cache
def saved_program(mesh: str, microbatches: int = 1) -> partc.Program:
    """A program of such a model; a preset that its mesh can have."""
    plan = "+".join(["fsdp", *["megatron"] * ("tp" in mesh)])
    batch = torch.zeros(8, 16), torch.zeros(8, 16)
    return partc.compile(SAVED(), mesh, batch, loss=loss_of, plan=plan, microbatches=microbatches)
