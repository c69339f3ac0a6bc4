"""Models of linear layers on the meta device, which take no memory, and their programs."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn

import partc
from partc.plan.mesh import Mesh
from partc.program import Program


def tower(width: int = 256, depth: int = 4) -> nn.Module:
    """``depth`` blocks of a linear layer and a GELU, then a linear layer to 24 columns."""
    blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)]
    return nn.Sequential(*blocks, nn.Linear(width, 24))


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The mean squared error."""
    return nn.functional.mse_loss(model(x), y)


def batch(samples: int = 4096, width: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets without data."""
    return torch.zeros(samples, width, device="meta"), torch.zeros(samples, 24, device="meta")


@cache
def compiled(mesh: str, plan: str, **options: Any) -> Program:
    """The program of a tower, made once for all tests; ``mesh="open"`` leaves the axes to partc."""
    where = Mesh.load("dgx-h100", 4) if mesh == "open" else mesh
    with torch.device("meta"):
        model = tower()
    return partc.compile(model, where, batch(), loss=loss_of, plan=plan, **options)
