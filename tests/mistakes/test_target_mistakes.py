"""Targets of another shape or dtype than a loss reads: the answer says what a target looks like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.mistakes.things import Mistake, check, compiled

Loss = Callable[..., Tensor]
ROWS, CLASSES = 8, 4
NUMBERS = torch.arange(ROWS) % CLASSES
ONE_HOT = F.one_hot(NUMBERS, CLASSES)
WORDS = torch.arange(ROWS * 6).reshape(ROWS, 6) % 5


class Scores(nn.Module):
    """``f32[8,4] -> f32[8,4]``, or of a sequence ``f32[8,6,4] -> f32[8,6,4]``."""

    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        self.head = nn.Linear(CLASSES, classes)

    def forward(self, x: Tensor) -> Any:
        return self.head(x)


def of(loss: Loss, target: Tensor, *words: str, rows: tuple[int, ...] = (ROWS,),
       classes: int = CLASSES) -> Mistake:  # fmt: skip
    """A loss of scores and a target; ``rows``: the dims before the scores."""
    x = torch.ones(*rows, CLASSES)

    def of_batch(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return loss(model(x), y)

    words = (f"{getattr(loss, '__name__', '')} of scores", *words)
    return (lambda: compiled(model=Scores(classes), inputs=(x, target), loss=of_batch)), words


def log_likelihood(scores: Tensor, y: Tensor) -> Tensor:
    return F.nll_loss(scores.log_softmax(-1), y)


log_likelihood.__name__ = "nll_loss"


def bce(scores: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy(scores.sigmoid(), y)


bce.__name__ = "binary_cross_entropy"
MISTAKES: dict[str, Mistake] = {
    "one-hot": of(
        F.cross_entropy, ONE_HOT, "int64[8, 4]", "y.argmax(1) of a one-hot y", "y.float()"
    ),
    "one-hot of nll_loss": of(log_likelihood, ONE_HOT, "int64[8, 4]", "y.argmax(1)"),
    "words": of(
        F.cross_entropy, WORDS, "float32[8, 6, 5]", "the classes stand along the last dim",
        "logits.flatten(0, 1) and y.flatten()", "logits.transpose(1, 2)", rows=(ROWS, 6), classes=5,
    ),
    "pixels": of(
        F.cross_entropy, torch.zeros(ROWS, 2, 3).long(), "logits.flatten(0, 2)", "movedim(-1, 1)",
        rows=(ROWS, 2, 3), classes=5,
    ),
    "words of nll_loss": of(
        log_likelihood, WORDS, "logits.flatten(0, 1) and y.flatten()", rows=(ROWS, 6), classes=5,
    ),
    "a column of classes": of(F.cross_entropy, NUMBERS[:, None], "y.squeeze(-1)"),
    "other rows": of(F.cross_entropy, NUMBERS[:4], "float32[8, 4]", "int64[4]", "shape [8]"),
    "classes as numbers": of(F.cross_entropy, NUMBERS.float(), "y.long()", "shape [8, 4]"),
    "a row of a column": of(F.binary_cross_entropy_with_logits, torch.ones(ROWS), "float32[8, 1]",
                            "logits.squeeze(-1)", "unsqueeze(-1)", classes=1),
    "classes of bce": of(
        F.binary_cross_entropy_with_logits, NUMBERS, "shape [8, 4]", "F.one_hot(y, classes)"
    ),
    "a column of bce": of(bce, torch.ones(ROWS, CLASSES, 1), "y.squeeze(-1)"),
    "classes of mse_loss": of(
        F.mse_loss, torch.ones(ROWS, 3), "float32[8, 3]", "Give a target of the shape [8, 4]"
    ),
    "classes of l1_loss": of(F.l1_loss, torch.ones(ROWS, 3), "Give a target of the shape [8, 4]"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_target_gets_a_sentence(mistake: str) -> None:
    check(MISTAKES[mistake])


def test_targets_that_fit_are_taken() -> None:
    for target in (NUMBERS, ONE_HOT.float()):
        compiled(
            model=Scores(), inputs=(torch.ones(ROWS, CLASSES), target),
            loss=lambda m, x, y: F.cross_entropy(m(x), y),
        )  # fmt: skip
