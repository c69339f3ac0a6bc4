"""A small model for sums that send fewer bytes."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

from tests.zoo import Case


@cache
def small() -> Case:
    """Two equal blocks, whose sums blocks of 64 do not divide."""
    layers = [nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(2)]
    model = nn.Sequential(*layers, nn.Linear(12, 9))
    return Case(model, (torch.randn(8, 12),), lambda m, x: m(x).square().mean())
