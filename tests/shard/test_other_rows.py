"""A model that forgot ``batch_first=True``, in a script whose ranks have rows of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.errors import PlanError
from partc.plan import Plan
from partc.plan.batch import MIXED_ROWS, OTHER_ROWS


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


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("takes", "kind"), [("mean", "gru"), ("mean", "attention"), ("last", "gru")]
)
def test_results_of_each_others_rows_are_refused(takes: str, kind: str) -> None:
    with pytest.raises(PlanError, match=r"has 4 rows, as dim 0(.|\n)*batch_first=True(.|\n)*pin"):
        compiled(Reads(takes, kind), torch.randn(4, 5, 8))


@pytest.mark.exhaustive
@pytest.mark.parametrize("takes", ["all", "mean over steps", "last step"])
def test_sequence_first_models_are_not(takes: str) -> None:
    plan = compiled(Reads(takes), torch.randn(5, 4, 8))
    assert plan.inputs["x"]
    assert not told(plan)


@pytest.mark.exhaustive
def test_a_pin_is_taken_at_its_word() -> None:
    plan = Plan.parse('preset = "ddp"\n[inputs]\n"x" = { batch = 1 }\n')
    assert not told(compiled(Reads("mean"), torch.randn(4, 5, 8), plan=plan))


def of_rows(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


@pytest.mark.exhaustive
def test_labels_of_mixed_rows_are_told_of() -> None:
    batch = torch.randn(4, 5, 8), torch.randint(3, (4,))
    assert "batch of x" in told(compiled(Reads("mean"), *batch, loss=of_rows))
    batch = torch.randn(5, 4, 8), torch.randint(3, (4,))
    assert not told(compiled(Reads("last step"), *batch, loss=of_rows))


class Encoder(nn.Module):
    """Samples of words that attend to each other along dim 0, or along dim 1."""

    def __init__(self, batch_first: bool, takes: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.words, self.takes = nn.Embedding(9, 8), takes
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.head(self.takes(self.encoder(self.words(ids))))
        return result


WORDS = torch.randint(9, (4, 6))
TAKEN: list[Callable[[Tensor], Tensor]] = [
    lambda y: y[:, -1], lambda y: y[:, 0], lambda y: y[:, :2].mean(1),
]  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("takes", TAKEN)
def test_places_of_rows_that_attend_to_each_other_are_refused(takes: Any) -> None:
    with pytest.raises(PlanError, match=r"mix along dim 0(.|\n)*batch_first=True"):
        compiled(Encoder(False, takes), WORDS)
    assert not told(compiled(Encoder(True, takes), WORDS))
    meant = Plan.parse('preset = "ddp"\n[inputs]\n"ids" = { batch = 0 }\n')
    assert not told(compiled(Encoder(False, takes), WORDS, plan=meant))


@pytest.mark.exhaustive
def test_attention_and_a_decoder_that_take_the_sequence_first_are_refused() -> None:
    attends = Reads("last", "attention"), torch.randn(4, 5, 8)
    with pytest.raises(PlanError, match=r"mix along dim 0 \(.*of dim 1, along which nothing mixes"):
        compiled(*attends)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0)

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            result: Tensor = self.both(target, source)[:, -1]
            return result

    with pytest.raises(PlanError, match="mix along dim 0"):
        compiled(Both(), torch.randn(4, 6, 8), torch.randn(4, 6, 8))


@pytest.mark.exhaustive
def test_so_it_is_told_where_the_step_has_the_loss() -> None:
    batch = WORDS, torch.randint(3, (4,))
    attends = Reads("last", "attention"), torch.randn(4, 5, 8), batch[1]
    assert "mix along dim 0 of x" in told(compiled(*attends, loss=of_rows))
    with pytest.raises(PlanError, match=r"x along dim 1, y along dim 0(.|\n)*batch_first=True"):
        compiled(Encoder(False, TAKEN[0]), *batch, loss=of_rows)
    assert not told(compiled(Encoder(True, TAKEN[0]), *batch, loss=of_rows))


class Views(nn.Module):
    """Two views of each sample, each compared with those of all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, pairs: Tensor) -> Tensor:
        one, other = (self.norm(self.layer(pairs[:, i])) for i in range(2))
        scores: Tensor = one @ other.T
        return scores.logsumexp(1)


def test_views_of_which_all_are_read_are_not() -> None:
    assert not told(compiled(Views(), torch.randn(4, 2, 8)))


def told(plan: Plan) -> str:
    return " ".join(note for note in plan.notes if note.startswith((OTHER_ROWS, MIXED_ROWS)))
