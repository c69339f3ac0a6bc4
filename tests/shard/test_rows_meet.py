"""Where rows of different ranks meet, a program computes of all of them what DDP has of one's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.plan import Plan
from partc.plan.batch import ROWS_MEET


class Towers(nn.Module):
    """Two towers, with a loss of the model's own."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.loss = nn.Linear(6, 8), nn.Linear(6, 8), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.a(x), self.b(y))


def contrastive(a: Tensor, b: Tensor) -> Tensor:
    logits = a @ b.T
    return F.cross_entropy(logits, torch.arange(len(a)))


def redundancy(a: Tensor, b: Tensor) -> Tensor:
    """Barlow twins: of a correlation over the whole batch."""
    return ((a.T @ b / len(a)) - torch.eye(8)).square().sum()


def centred(a: Tensor, b: Tensor) -> Tensor:
    return (a - a.mean(0)).square().mean() + b.square().mean()


def of_pairs(a: Tensor, b: Tensor) -> Tensor:
    return F.mse_loss(a, b)


def of_classes(a: Tensor, b: Tensor) -> Tensor:
    return F.cross_entropy(a, b.argmax(1)) + F.normalize(b, dim=1).square().mean()


def notes_of(model: nn.Module, batch: str = "local", mesh: str = "dp=2") -> list[str]:
    inputs = torch.zeros(4, 6), torch.zeros(4, 6)
    program = partc.compile(
        model, mesh, inputs, loss=lambda m, x, y: m(x, y), plan="ddp", batch=batch
    )
    return [n for n in Plan.parse(program.plan).notes if n.startswith(ROWS_MEET)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("loss", [contrastive, redundancy, centred])
def test_the_first_line_where_they_meet_is_told(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    [note] = notes_of(Towers(loss))
    assert "test_rows_meet.py" in note
    assert "under DDP of one rank's" in note


@pytest.mark.parametrize("loss", [of_pairs, of_classes])
def test_a_loss_of_each_row_is_not_told(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert notes_of(Towers(loss)) == []


def test_one_that_is_given_all_rows_or_has_them_is_not_told() -> None:
    assert notes_of(Towers(contrastive), batch="global") == []
    assert notes_of(Towers(contrastive), mesh="dp=1") == []


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(6, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.norm(self.a(x)), self.b(y), reduction="sum") / len(x)


def test_a_batch_norm_which_has_a_key_of_its_own_is_not_told() -> None:
    assert notes_of(Normed()) == []
