"""Copy what a rank's random numbers follow from, for copies of a stage."""

from __future__ import annotations

import torch
from torch import nn


def copy_random_state(old: nn.Module, new: nn.Module) -> None:
    """Give a rank's module the generators and numbers (seed, step) of another."""
    for before, after in zip(old.modules(), new.modules(), strict=True):
        for name, value in vars(before).items():
            if isinstance(value, torch.Generator):
                made = torch.Generator(value.device)
                setattr(after, name, made.set_state(value.get_state()))
            elif isinstance(value, bool | int | float | str):
                setattr(after, name, value)
