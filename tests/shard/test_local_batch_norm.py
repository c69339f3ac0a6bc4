"""Batch norms over microbatches, with and without running statistics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partc


def loss_of(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), target)


@pytest.mark.rows(2)
@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("mesh", ["dp=2", "pp=2"])
def test_each_microbatch_has_its_own_statistics(mesh: str, tracked: bool) -> None:
    norm = nn.BatchNorm1d(6, track_running_stats=tracked)
    model = nn.Sequential(nn.Linear(6, 6), norm, nn.Tanh(), nn.Linear(6, 6))
    batch = torch.randn(16, 6), torch.randn(16, 6)
    options: Any = {"plan": "ddp", "microbatches": 2}
    program = partc.compile(model, mesh, batch, loss=loss_of, **options)
    assert partc.Plan.parse(program.plan).batch_norm == "local"
    partc.verify(program, model, batch, loss=loss_of).check()


def test_every_microbatch_counts() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    batch = torch.randn(16, 6), torch.randn(16, 6)
    program = partc.compile(model, "dp=1", batch, loss=loss_of, plan="ddp", microbatches=4)
    stage = program.module()
    stage.load_full(model)
    stage.step(*batch)
    assert int(stage.full_state_dict()["1.num_batches_tracked"]) == 4
