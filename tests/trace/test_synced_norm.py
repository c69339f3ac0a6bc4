"""``nn.SyncBatchNorm``, to which scripts for DDP convert their models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partc
from partc.errors import PlanError
from partc.verification.processes import Processes
from tests.program.families import close

X = torch.randn(8, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)
    return nn.Sequential(*layers).double()


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


@pytest.mark.rows(1)
@pytest.mark.parametrize("layout", [("dp=2", "fsdp"), ("dp=2,tp=2", "ddp+megatron")])
def test_a_synced_norm_is_that_of_one_device(layout: tuple[str, str]) -> None:
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(net())
    program = partc.compile(synced, layout[0], (X,), loss=loss_of, plan=layout[1])
    plain = partc.compile(net(), layout[0], (X,), loss=loss_of, plan=layout[1])
    assert program.plan == plain.plan
    partc.verify(program, synced, (X,), loss=loss_of).check()
    partc.verify(program, net(), (X,), loss=loss_of).check()


def test_local_statistics_of_a_synced_norm_are_refused() -> None:
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(net())
    with pytest.raises(PlanError, match=r"1, batch_norm = .local.*nn.SyncBatchNorm"):
        partc.compile(synced, "dp=2", (X,), loss=loss_of, plan="ddp", batch_norm="local")


def trained() -> None:
    """A model that is converted as for DDP, in a process group; and evaluated."""
    reference = net()
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(reference))
    model: Any = partc.parallelize(synced, "dp=2", loss=loss_of, plan="ddp", batch="global")
    theirs, ours = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (reference, model))
    for _ in range(3):
        expected = loss_of(reference, X)
        close(model.step(X), expected, "loss")
        theirs.zero_grad()
        expected.backward()
        theirs.step()
        ours.step()
        ours.zero_grad()
    reference.eval()
    model.eval()
    close(model(X), reference(X), "results in eval mode")


@pytest.mark.exhaustive
@pytest.mark.gloo
def test_a_converted_model_trains_as_one_process(world: Processes) -> None:
    world.run(trained, num=2)
