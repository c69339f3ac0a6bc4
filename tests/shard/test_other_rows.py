"""A model that forgot ``batch_first=True``, in a script whose ranks have rows of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.errors import PlanError
from partc.plan import Plan
from partc.plan.batch import OTHER_ROWS


class Reads(nn.Module):
    """A recurrent layer or attention, the sequence first, and what follows of its results."""

    def __init__(self, takes: str, kind: str = "gru") -> None:
        super().__init__()
        self.layer = nn.GRU(8, 8) if kind == "gru" else nn.MultiheadAttention(8, 2)
        self.head, self.takes, self.kind = nn.Linear(8, 3), takes, kind

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(*([x] if self.kind == "gru" else [x, x, x]))[0]
        taken = {
            "all": y, "mean": y.mean(1), "last": y[:, -1],
            "mean over steps": y.mean(0), "last step": y[-1],
        }  # fmt: skip
        result: Tensor = self.head(taken[self.takes])
        return result


def compiled(model: nn.Module, *batch: Tensor, loss: Any = None, plan: Any = "ddp") -> Plan:
    loss = loss or partc.ScriptLoss(model)
    program = partc.compile(model, "dp=2", batch, loss=loss, plan=plan, batch="local")
    return Plan.parse(program.plan)


@pytest.mark.parametrize(
    ("takes", "kind"), [("mean", "gru"), ("mean", "attention"), ("last", "gru")]
)
def test_results_of_each_others_rows_are_refused(takes: str, kind: str) -> None:
    with pytest.raises(PlanError, match=r"has 4 rows, as dim 0(.|\n)*batch_first=True(.|\n)*pin"):
        compiled(Reads(takes, kind), torch.randn(4, 5, 8))


@pytest.mark.parametrize("takes", ["all", "mean over steps", "last step"])
def test_sequence_first_models_are_not(takes: str) -> None:
    plan = compiled(Reads(takes), torch.randn(5, 4, 8))
    assert plan.inputs["x"]
    assert not told(plan)


def test_a_pin_is_taken_at_its_word() -> None:
    plan = Plan.parse('preset = "ddp"\n[inputs]\n"x" = { batch = 1 }\n')
    assert not told(compiled(Reads("mean"), torch.randn(4, 5, 8), plan=plan))


def of_rows(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def test_labels_of_mixed_rows_are_told_of() -> None:
    batch = torch.randn(4, 5, 8), torch.randint(3, (4,))
    assert "batch of x" in told(compiled(Reads("mean"), *batch, loss=of_rows))
    batch = torch.randn(5, 4, 8), torch.randint(3, (4,))
    assert not told(compiled(Reads("last step"), *batch, loss=of_rows))


def told(plan: Plan) -> str:
    return " ".join(note for note in plan.notes if note.startswith(OTHER_ROWS))
