"""The losses that torch has: each is cut by sample, and the whole batch nowhere needed."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.errors import PartcError
from partc.verification.verification import verify

CLASSES, SAMPLES, FEATURES = 6, 16, 8
ONE_OF = (  # losses of scores against one class for each sample
    F.cross_entropy,
    partial(F.cross_entropy, label_smoothing=0.1),
    lambda x, c: F.cross_entropy(x, c, weight=1 / torch.arange(1, CLASSES + 1).to(x)),
    lambda x, c: F.nll_loss(F.log_softmax(x, -1), c),
)
LIKELY = (  # of scores against a number between 0 and 1 for each class
    F.l1_loss, F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.poisson_nll_loss,
    F.binary_cross_entropy_with_logits,
    lambda x, y: F.binary_cross_entropy(x.sigmoid(), y),
    lambda x, y: F.binary_cross_entropy_with_logits(
        x, y, weight=1 + y, pos_weight=torch.arange(CLASSES).to(x)
    ),
    lambda x, y: F.cross_entropy(x, F.softmax(y, -1)),
    lambda x, y: F.kl_div(F.log_softmax(x, -1), F.softmax(y, -1), reduction="batchmean"),
    lambda x, y: F.multilabel_soft_margin_loss(x, y.round()),
    lambda x, y: F.soft_margin_loss(x, 2 * y.round() - 1),
    lambda x, y: F.hinge_embedding_loss(x, 2 * y.round() - 1),
    lambda x, y: F.cosine_embedding_loss(x, y, 2 * y[:, 0].round() - 1),
    lambda x, y: F.margin_ranking_loss(x.sum(1), y.sum(1), 2 * y[:, 0].round() - 1),
    lambda x, y: F.triplet_margin_loss(x, y, y.flip(1)),
)  # fmt: skip
WHOLE = (F.multi_margin_loss, lambda x, c: F.multilabel_margin_loss(x, F.one_hot(c, CLASSES)))


def batch() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    classes = torch.randint(CLASSES, (SAMPLES,))
    return torch.randn(SAMPLES, FEATURES), classes, torch.rand(SAMPLES, CLASSES)


def all_of(model: nn.Module, x: Tensor, classes: Tensor, likely: Tensor) -> Tensor:
    scores = model(x)
    losses = [loss(scores, classes) for loss in ONE_OF]
    return torch.stack([*losses, *(loss(scores, likely) for loss in LIKELY)]).sum()


def ctc(
    model: nn.Module, x: Tensor, targets: Tensor, steps: Any, length: Any, **given: Any
) -> Tensor:
    """A connectionist temporal loss of the scores of each step."""
    scores = model(x).log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(scores, targets, steps, length, **given)


def steps(num_samples: int = SAMPLES) -> tuple[Tensor, ...]:
    """Steps of samples, their targets, and how many of both count."""
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(num_samples, 12, FEATURES, generator=drawn)
    targets = torch.randint(1, CLASSES, (num_samples, 4), generator=drawn)
    length = torch.randint(8, 13, (num_samples,), generator=drawn)
    return x, targets, length, torch.randint(1, 5, (num_samples,), generator=drawn)


def of_numbers(lengths: tuple[list[int], list[int]]) -> Any:
    return lambda model, x, targets, *_: nn.CTCLoss()(
        model(x).log_softmax(-1).transpose(0, 1), targets, *lengths
    )


TEMPORAL: dict[str, Any] = {
    "tensors": ctc,
    "sums": partial(ctc, reduction="sum", zero_infinity=True),
    "each": lambda *given: ctc(*given, reduction="none").square().mean(),
    "equal numbers": of_numbers(([12] * SAMPLES, [4] * SAMPLES)),
    "numbers": of_numbers(([12, 9] * (SAMPLES // 2), [4, 1] * (SAMPLES // 2))),
    "targets in a row": lambda model, x, targets, length, _: ctc(
        model, x, targets.flatten(), length, torch.full((len(x),), 4)
    ),
}


@pytest.mark.rows(3)
@pytest.mark.parametrize(
    ("mesh", "plan", "microbatches"),
    [("dp=2", "ddp", 1), ("dp=2", "fsdp", 1), ("pp=2", "ddp", 2), ("tp=2", "megatron", 1)],
)
@pytest.mark.parametrize("loss", TEMPORAL)
def test_temporal_losses_are_cut_by_sample(
    loss: str, mesh: str, plan: str, microbatches: int
) -> None:
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.GELU(), nn.Linear(FEATURES, CLASSES))
    whole = loss == "targets in a row"  # which of them are a sample's, only the lengths say
    program = partc.compile(
        model, mesh, steps(), loss=TEMPORAL[loss], plan=plan,
        microbatches=1 if whole else microbatches,
    )  # fmt: skip
    assert whole or plan in ("fsdp", "megatron") or "all_gather" not in program.source()
    verify(program, model, steps(), TEMPORAL[loss]).check(1e-12)


def test_temporal_losses_have_a_length_for_each_sample() -> None:
    model, loss = nn.Linear(FEATURES, CLASSES), of_numbers(([12] * 4, [4] * 4))
    with pytest.raises(PartcError, match="4 lengths for a batch of size 16"):
        partc.compile(model, "dp=2", steps(), loss=loss, plan="ddp")


@pytest.mark.exhaustive
def test_each_microbatch_has_its_part() -> None:
    model = nn.Linear(FEATURES, CLASSES)
    program = partc.compile(model, "dp=2", batch(), loss=all_of, plan="ddp", microbatches=2)
    assert "all_gather" not in program.source()
    verify(program, model, batch(), all_of).check(1e-12)


@pytest.mark.exhaustive
@pytest.mark.parametrize("loss", WHOLE)
def test_losses_without_a_rule_see_the_whole_batch(loss: object) -> None:
    """One has no gradient for what experiments draw: no cut may be believed for that."""

    def of_one(model: nn.Module, x: Tensor, classes: Tensor, likely: Tensor) -> Tensor:
        found: Tensor = loss(model(x), classes)  # type: ignore[operator]
        return found + 0 * likely.sum()

    model = nn.Linear(FEATURES, CLASSES)
    program = partc.compile(model, "dp=2", batch(), loss=of_one, plan="ddp")
    verify(program, model, batch(), of_one).check(1e-12)
    with pytest.raises(PartcError, match="needs the whole batch"):
        partc.compile(model, "dp=2", batch(), loss=of_one, plan="ddp", microbatches=2)


class Residual(nn.Module):
    """A block whose weights a loss may penalise."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(FEATURES, 2 * FEATURES), nn.Linear(2 * FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.relu(self.up(x)))
        return y


def penalised(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    penalty = torch.stack([p.square().sum() for p in model.parameters() if p.ndim > 1]).sum()
    loss: Tensor = F.mse_loss(model(x), y) + 1e-3 * penalty
    return loss


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mesh", "plan", "schedule"),
    [("dp=2", "fsdp", "1f1b"), ("pp=2,dp=2", "fsdp", "1f1b"), ("pp=2", "ddp", "zb-v")],
)
def test_a_penalty_on_the_weights_of_blocks_counts_once(
    mesh: str, plan: str, schedule: str
) -> None:
    """Microbatches share the penalty, so that the first alone adds its gradient, in each block."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Residual() for _ in range(8)))
    given = torch.randn(SAMPLES, FEATURES), torch.randn(SAMPLES, FEATURES)
    program = partc.compile(
        model, mesh, given, loss=penalised, plan=plan, microbatches=2, schedule=schedule
    )
    verify(program, model, given, penalised).check(1e-12)
