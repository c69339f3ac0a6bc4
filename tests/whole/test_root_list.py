"""Blocks that stand in a list at the model's root, so that their names are bare numbers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import partc


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.GELU())


def test_a_pipeline_of_a_plain_sequential() -> None:
    torch.manual_seed(0)
    for blocks in ([nn.Linear(16, 16) for _ in range(8)], [block() for _ in range(8)]):
        model = nn.Sequential(*blocks, nn.Linear(16, 4))
        x = torch.randn(8, 16)
        made = partc.compile(
            model, "pp=4", (x,), loss=loss_of, plan="ddp", microbatches=8, schedule="1f1b"
        )
        assert partc.verify(made, model, (x,), loss_of).check().worst.error < 1e-12
