"""A loaded program that is given another loss than the one with which it was saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.errors import UsageError
from partc.program import Program


class Net(nn.Module):
    """Draws, and has buffers that a step changes, reads, and gives numbers of."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("scale", torch.rand(8) + 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.norm(self.first(x)).relu()) * self.scale
        result: Tensor = self.last(y)
        return result


def smoothed(by: float) -> Callable[..., Tensor]:
    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, label_smoothing=by)

    return loss_of


def with_logits(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    logits = model(x)
    return F.cross_entropy(logits, y), logits


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("saved") / "program"
    batch = torch.randn(8, 6), torch.randint(3, (8,))
    partc.compile(Net(), "dp=2", batch, loss=smoothed(0.1), plan="ddp").save(folder)
    return folder


def given(folder: Path, loss: Any, model: nn.Module | None = None) -> Program:
    return partc.with_model(partc.load(folder), model or Net(), loss)


def with_weight(model: Net, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return smoothed(0.1)(model, x, y), {"of weights": model.last.weight.sum()}


@pytest.mark.rows(2)
@pytest.mark.parametrize(
    ("loss", "what"),
    [(smoothed(0.0), "loss"), (with_logits, "loss"), (with_weight, "result of_weights")],
)
def test_another_loss_is_refused(saved: Path, loss: Any, what: str) -> None:
    with pytest.raises(
        UsageError, match=rf"another step than the program: {what} has(.|\n)*also\("
    ):
        given(saved, loss)


@pytest.mark.exhaustive
def test_the_same_loss_in_other_words_is_taken(saved: Path) -> None:
    def other(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = nn.CrossEntropyLoss(label_smoothing=0.1)(net(x), y)
        return loss

    torch.manual_seed(1)
    batch = torch.randn(4, 6), torch.ones(4).long()
    for model in (Net(), Net().to("meta")):
        assert given(saved, other, model).for_shapes(batch).others
