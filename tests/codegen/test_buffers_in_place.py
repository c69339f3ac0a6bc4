"""New values of buffers are written where the old ones lie, where nobody reads these any more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partc
from partc.errors import PlanError

DEEP = 6


class Net(nn.Module):
    """Equal blocks that normalise over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU()) for _ in range(DEEP)
        )
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        y: Tensor = self.out(x)
        return y


def squared(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).pow(2).mean()
    return loss


def compiled(mesh: Any, plan: str, **options: Any) -> str:
    """The program's text; its losses, gradients and buffers are those of the model."""
    torch.manual_seed(0)
    model, batch = Net(), (torch.randn(16, 16),)
    program = partc.compile(model, mesh, batch, loss=squared, plan=plan, **options)
    partc.verify(program, model, batch, loss=squared).check()
    return program.source()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mesh", "options"),
    [({}, {}), ("pp=2", {"microbatches": 4}), ({}, {"recompute": "none"})],
)
def test_the_kernel_writes_running_statistics(mesh: Any, options: dict[str, Any]) -> None:
    text = compiled(mesh, "ddp", **options)
    assert "torch.native_batch_norm(" in text
    assert "num_batches_tracked += 1" in text
    assert ".copy_(" not in text


@pytest.mark.rows(1)
@pytest.mark.parametrize("mesh", [{}, "pp=2"])
def test_a_norm_that_is_computed_again_has_none(mesh: Any) -> None:
    text = compiled(mesh, "ddp", microbatches=2, recompute="block")
    forward, _, backward = text.partition("def backward")
    assert "_running_mean," in forward.split("torch.native_batch_norm(")[1]
    assert "None, None, training=True" in backward


@pytest.mark.exhaustive
def test_cut_statistics_are_gathered_before_they_are_written() -> None:
    text = compiled("tp=2", "megatron")
    assert "_native_batch_norm_legit_functional(" in text
    assert "running_mean.copy_(" in text


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mesh", "plan", "options"),
    [
        ("dp=2", "fsdp", {"batch_norm": "local"}),
        ("dp=2", "zero1", {"microbatches": 2}),
        ("pp=2,dp=2", "ddp", {"microbatches": 2, "schedule": "zb-v"}),
    ],
)
def test_statistics_of_pieces_are_those_of_the_model_in_pieces(
    mesh: str, plan: str, options: dict[str, Any]
) -> None:
    """Those kept are the first rank's."""
    assert "== 0 else torch.zeros_like(" in compiled(mesh, plan, **options)


def test_a_piece_needs_a_variance() -> None:
    with pytest.raises(PlanError, match=r"2 pieces of each of 8 microbatches of \[16, 16\]"):
        compiled("dp=2", "ddp", microbatches=8)
