"""What an optimizer steps on and nothing trains: told at its first step with it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from partc.errors import RunError
from partc.program.tensors.homes import HomeTensor
from partc.users_line import warn

Optimizer = torch.optim.Optimizer


def check_any_gradient(optimizer: Optimizer, params: Sequence[Tensor]) -> None:
    """RunError if an optimizer over tensors that want no gradient has found none."""
    if all(param.grad is None for param in params):
        raise RunError(
            where=f"{type(optimizer).__name__}.step",
            what=f"none of its {len(params)} tensors wants a gradient, so that it has done nothing",
            why="a state dict of a stage has tensors without gradients; or all are frozen",
            do="Build the optimizer over stage.parameters(), or stage.named_parameters().",
        )


def tell_of_strangers(optimizer: Optimizer) -> None:
    """Warn of a parameter without a gradient that is none of the stage's, beside those that are: of
    a layer that the model got behind the compile.
    """
    groups = [group["params"] for group in optimizer.param_groups]
    if not any(isinstance(param, HomeTensor) for group in groups for param in group):
        return
    for number, group in enumerate(groups):
        for place, param in enumerate(group):
            if param.requires_grad and param.grad is None and not isinstance(param, HomeTensor):
                warn(
                    f"partc: {type(optimizer).__name__}.step() finds no gradient of parameter "
                    f"{place} of its group {number}, of shape {list(param.shape)}, which is none "
                    "of the stage's: no step trains it. A layer that the model got since it was "
                    "compiled is in no program: add it before, and compile the model with it"
                )
                return
