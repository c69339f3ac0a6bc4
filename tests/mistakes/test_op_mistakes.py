"""Calls of torch whose operands do not fit, and words of plans: what stands in their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from tests.mistakes.things import Mistake, Net, batch_of, check, compiled, loss_of

X, Y = batch_of()
NUMBERS = torch.ones(8, 4, dtype=torch.int64)
anything: Any = partc


class Own(Net):
    """With a forward of a test's own."""

    def __init__(self, forward: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.own = forward

    def forward(self, x: Tensor) -> Any:
        return self.own(self, super().forward(x))


def of(forward: Callable[[Any, Tensor], Any], *words: str) -> Mistake:
    return (lambda: compiled(model=Own(forward))), words


def loss(loss: Callable[..., Any], *words: str) -> Mistake:
    return (lambda: compiled(loss=loss)), words


def plan(given: Any, *words: str) -> Mistake:
    return (lambda: compiled(plan=given)), words


def attended(model: Any, x: Tensor) -> Tensor:
    mask = torch.ones(8, 8, dtype=torch.int64)
    return F.scaled_dot_product_attention(x[None], x[None], x[None], attn_mask=mask)[0]


def scaled(model: Any, x: Tensor) -> Tensor:
    model.up.weight.mul_(0.9)
    return x


MISTAKES: dict[str, Mistake] = {
    # layers and losses
    "channels last": (
        lambda: compiled(model=nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(400, 4)),
                         inputs=(torch.ones(8, 12, 12, 3), Y)),
        ("x.permute(0, 3, 1, 2)", "x.unsqueeze(1)"),
    ),
    "a weight in place": of(scaled, "writes into a parameter in place", "self.weight * 0.9"),
    "a detached copy": loss(
        lambda m, x, y: torch.tensor(loss_of(m, x, y).detach(), requires_grad=True), "no trainable"
    ),
    "its data": loss(lambda m, x, y: loss_of(m, x, y).data, "without detach(), .data"),
    "a mask of attention": of(attended, "a mask has numbers", "mask.bool()"),
    "a mask that fills": of(lambda m, x: x.masked_fill(NUMBERS, 0.0), "a mask has numbers"),
    "t of three dims": of(lambda m, x: x[None].t(), "x.transpose(-2, -1)", "x.mT"),
    "letters": of(lambda m, x: torch.einsum("bi,bj->bk", x, x), "Correct the equation"),
    "sizes of letters": of(
        lambda m, x: torch.einsum("bi,ji->bj", x, torch.ones(3, 5)), "a letter has one size"
    ),
    "a criterion's class": loss(
        lambda m, x, y: nn.MSELoss(m(x), y), "nn.MSELoss()(prediction, target)"
    ),
    "an array of answers": of(lambda m, x: x if x > 0 else -x, "torch.where(x > 0, a, b)"),
    "no target": loss(lambda m, x, y: nn.MSELoss()(m(x)), "'target'", "Correct this call"),
    "a mean of a mean": loss(lambda m, x, y: loss_of(m, x, y).mean(1), 'reduction="none"'),
    "a complex loss": loss(lambda m, x, y: torch.fft.fft(m(x)).mean(), "loss.abs(), or loss.real"),
    "cat": of(lambda m, x: torch.cat([x, x[:, :2]]), "F.pad makes one longer"),
    "stack": of(lambda m, x: torch.stack([x, x[:, :2]]), "the same sizes"),
    "reshape": of(lambda m, x: x.reshape(8, 5), "whose product is that number", "-1"),
    "a name": of(lambda m, x: m.dwon(x), "'dwon'", "Did you mean 'down'?"),
    "a wrapper": loss(lambda m, x, y: loss_of(m.module, x, y), "Leave .module out"),
    "classes": loss(
        lambda m, x, y: F.mse_loss(m(x), F.one_hot(y[:, 0].long()).float()), "num_classes=10"
    ),
    "a key": of(lambda m, x: {1: x}[x.sum()], "looked up as a key", "n.item()"),  # type: ignore[index]
    "None": (lambda: compiled(inputs=(X, None)), ("None stands where a tensor is needed",)),
    # plans
    "a colon": plan("fsdp:megatron", "Write 'fsdp+megatron'."),
    "an ampersand": plan("fsdp & tp", "Write 'fsdp+megatron'."),
    "a stage of ZeRO": plan("3", "Write 'fsdp', as partc calls it."),
    "its number": plan(3, "plan is 3", "plan='fsdp'"),
    "commas": plan('preset="ddp", microbatches=2', "TOML has one key = value in a line"),
    "a number of a schedule": plan("schedule = 1", 'schedule = "1f1b"'),
    "a table of a preset": plan('[preset]\nname = "fsdp"', 'preset = "fsdp"'),
    "an axis of an input": plan('[inputs]\nx = "dp"', 'Write "x" = { dp = 0 }'),
    # checkpoints
    "keep": (lambda: anything.Checkpoints("no", keep=3), ("keep_latest_k=3 keeps the last",)),
    "every": (lambda: anything.Checkpoints("no", every=10), ("interval=100 says after how",)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_call_gets_a_sentence(mistake: str) -> None:
    check(MISTAKES[mistake])
