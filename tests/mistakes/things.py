"""A model, its batch, and the program that mistakes are made with; all tiny."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

import partc
from partc.errors import PartcError
from partc.program import Program


class Net(nn.Module):
    """Two layers, ``f32[8,4] -> f32[8,4]``."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.up = nn.Linear(width, 8)
        self.down = nn.Linear(8, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.up(x).relu())
        return result


def batch_of(rows: int = 8, width: int = 4) -> tuple[Tensor, Tensor]:
    return torch.ones(rows, width), torch.ones(rows, width)


def loss_of(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), target)


def compiled(**changed: Any) -> Program:
    """``partc.compile`` with these arguments in place of right ones."""
    right: dict[str, Any] = {
        "model": Net(), "mesh": "dp=2", "inputs": batch_of(), "loss": loss_of, "plan": "ddp",
    }  # fmt: skip
    return partc.compile(**{**right, **changed})


@contextmanager
def one_rank() -> Iterator[None]:
    """One rank, which needs no launcher."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@cache
def program() -> Program:
    return compiled()


Mistake = tuple[Callable[[], Any], tuple[str, ...]]  # what somebody does, and words of the answer


def check(mistake: Mistake) -> None:
    """The mistake is refused in words, which name the culprit and the remedy."""
    make, words = mistake
    with pytest.raises(PartcError) as caught:
        make()
    text = str(caught.value)
    assert caught.value.do, text
    assert [word for word in words if word not in text] == [], text
