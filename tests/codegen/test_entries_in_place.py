"""Entries that are written into new zeros are written in place; others into a copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import partc
from tests.patience import patience


class Writes(nn.Module):
    """Scores of picked columns, written into zeros, or over a value that is read once more."""

    def __init__(self, over: str) -> None:
        super().__init__()
        self.into, self.head, self.over = nn.Linear(6, 12), nn.Linear(4, 12), over

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.into(x))
        top, _ = h.topk(4, -1)
        picked = torch.gather(h, 1, ids)
        base = h if self.over == "value" else torch.zeros(len(x), 12, dtype=h.dtype)
        base = base.clone()
        base[:, ids[0]] = top
        y: torch.Tensor = self.head(top + picked) + base + h
        return y


def loss_of(model: nn.Module, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x, ids), torch.ones(len(x), 12, dtype=x.dtype))


def compiled(over: str, mesh: str, plan: str) -> str:
    torch.manual_seed(0)
    model = Writes(over).double()
    ids = torch.stack([torch.randperm(12)[:4] for _ in range(8)])
    batch: Any = torch.randn(8, 6, dtype=torch.float64), ids
    program = partc.compile(model, mesh, batch, loss=loss_of, plan=plan)
    partc.verify(program, model, batch, loss=loss_of, timeout=patience()).check()
    return program.source()


@pytest.mark.parametrize(("mesh", "plan"), [("dp=2", "ddp"), ("dp=2,tp=2", "fsdp+megatron")])
def test_new_zeros_are_written_in_place(mesh: str, plan: str) -> None:
    source = compiled("zeros", mesh, plan)
    assert "[:, ids[0]] = top" in source
    assert ".scatter_add_(1, " in source
    assert ".scatter_(-1, " in source
    assert "torch.scatter" not in source


def test_a_value_that_is_read_again_is_copied() -> None:
    source = compiled("value", "dp=2", "ddp")
    assert "index_put(h, [None, ids[0]], top" in source
