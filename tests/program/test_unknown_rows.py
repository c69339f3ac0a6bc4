"""Indices outside of a table, where ranks hold parts of its rows: refused, as one device does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.codegen.helpers import printed
from partc.errors import RunError
from partc.graph import ops
from partc.verification.processes import Processes
from tests.program.families import close

ROWS = 12


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, 8, dtype=torch.float64)
        self.head = nn.Linear(8, ROWS, bias=False, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(ids))
        return logits


def loss_for(ignored: int) -> Any:
    def loss_of(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=ignored)

    return loss_of


def batch(ignored: int) -> tuple[Tensor, Tensor]:
    ids = torch.arange(16).reshape(4, 4) % ROWS
    return ids, torch.where(ids % 3 == 1, ignored, ROWS - 1 - ids)


@pytest.mark.parametrize("window", [ops.window, printed.window])
def test_every_rank_refuses_an_index_of_no_row(window: Any) -> None:
    known = torch.tensor([0, 5, 11, 255])
    for rank, mine in enumerate(([0, 5, -1, -1], [-1, -1, 5, -1])):
        assert window(known, rank, 6, ignore=255, of=ROWS).tolist() == mine
        for wrong in (-1, 12, 254):
            with pytest.raises(RuntimeError, match="index out of range of 12 rows"):
                window(torch.tensor([0, wrong]), rank, 6, ignore=255, of=ROWS)


def steps(ignored: int) -> None:
    """A step as on one device; then a batch with an id, and one with a label, of no row."""
    torch.manual_seed(0)
    reference, loss_of = Tagger(), loss_for(ignored)
    model: Any = partc.parallelize(Tagger(), "tp=2", plan="megatron", loss=loss_of)
    model.load_state_dict(reference.state_dict())
    ids, labels = batch(ignored)
    close(model.step(ids, labels), loss_of(reference, ids, labels), "loss")
    for wrong in (
        (torch.where(ids == 5, ROWS, ids), labels),
        (ids, torch.where(labels == 11, ROWS, labels)),
    ):
        with pytest.raises(RunError, match="index out of range of 12 rows"):
            model.step(*wrong)


@pytest.mark.gloo
@pytest.mark.parametrize("ignored", [-100, 255])
def test_ranks_refuse_what_one_device_refuses(world: Processes, ignored: int) -> None:
    world.run(steps, ignored, num=2)
