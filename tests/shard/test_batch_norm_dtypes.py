"""Batch norms of narrow floats: as torch's kernels, statistics in float32, results rounded.

And batch norms in evaluation, whose running statistics are numbers of the step.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc

BATCH = torch.randn(8, 3, 8, 8) + 2, torch.randint(4, (8,))


def net() -> nn.Module:
    torch.manual_seed(0)
    conv, head = nn.Conv2d(3, 16, 3, bias=False), nn.Linear(576, 4)
    return nn.Sequential(conv, nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), head)


def in_autocast(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = model(x)
    return F.cross_entropy(scores.float(), y)


def in_bfloat16(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x.bfloat16()).float(), y)


@pytest.mark.rows(2)
@pytest.mark.parametrize(
    ("loss", "mesh", "plan", "how"),
    [
        (in_autocast, "dp=2", "ddp", {}),
        (in_autocast, "dp=2", "fsdp", {"microbatches": 2}),
        (in_bfloat16, "dp=2", "ddp", {}),
        (in_bfloat16, "tp=2", "megatron", {}),
        (in_bfloat16, "dp=2", "ddp", {"microbatches": 2}),
        (in_bfloat16, "dp=2", "ddp", {"batch_norm": "local"}),
    ],
)
def test_dtypes(loss: Any, mesh: str, plan: str, how: dict[str, Any]) -> None:
    model = net().bfloat16() if loss is in_bfloat16 else net()
    program = partc.compile(model, mesh, BATCH, loss=loss, plan=plan, **how)
    partc.verify(program, model, BATCH, loss).check()
    rounded = partc.verify(program, model, BATCH, loss, dtype=None)
    kinds = {row.kind: row.error for row in sorted(rounded.rows)}
    assert max(kinds["loss"], kinds["buffer"]) < 2e-2
    assert kinds["gradient"] < 3 * rounding(model, loss)


def rounding(model: nn.Module, loss: Any) -> float:
    """The largest relative error of torch's own gradients in one process, against float64."""
    exact, own = copy.deepcopy(model).double(), copy.deepcopy(model)
    x = BATCH[0].bfloat16() if loss is in_bfloat16 else BATCH[0]
    F.cross_entropy(exact(x.double()), BATCH[1]).backward()
    loss(own, *BATCH).backward()
    return max(map(error, own.parameters(), exact.parameters()))


def error(param: Tensor, exact: Tensor) -> float:
    assert param.grad is not None
    assert exact.grad is not None
    return float((param.grad - exact.grad).abs().max() / exact.grad.abs().max())


@pytest.mark.rows(1)
@pytest.mark.parametrize(
    ("mesh", "plan"), [("dp=2", "ddp"), ("tp=2", "megatron"), ("dp=2,tp=2", "fsdp+megatron")]
)
def test_frozen_statistics_are_cut_by_channels(mesh: str, plan: str) -> None:
    model = net().double()
    batch = BATCH[0].double(), BATCH[1]
    model(batch[0])  # statistics other than those of a new module
    model.eval()

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    program = partc.compile(model, mesh, batch, loss=loss, plan=plan)
    partc.verify(program, model, batch, loss).check()
