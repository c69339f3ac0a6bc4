"""Mistakes with layers: views, tuples, sizes that tensors decide, layers that a forward makes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import partc
from tests.mistakes.things import Mistake, Net, batch_of, check, compiled, loss_of

X, Y = batch_of()
WORDS = torch.ones(8, 6, 4)
N = torch.tensor(2)
Forward = Callable[[Any, Tensor], Any]


class Own(Net):
    """With a forward of a test's own."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.own = forward
        self.rnn = nn.LSTM(4, 4, batch_first=True)
        self.gru = nn.GRU(4, 4, batch_first=True)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.own(self, super().forward(x))


def of(forward: Forward, *words: str, inputs: Any = (X, Y)) -> Mistake:
    return (lambda: compiled(model=Own(forward), inputs=inputs)), words


def layers(*each: nn.Module, words: tuple[str, ...]) -> Mistake:
    model = nn.Sequential(*each)
    return (lambda: compiled(model=model, inputs=(WORDS, WORDS))), words


VIEWED = ("transpose", ".reshape(...) in place of .view(...)", ".contiguous()")
SIZED = ("A size is part of a program", "mask", "n.item()")
IN_TURN = (WORDS, WORDS)


def sized(loss: Callable[..., Tensor], *words: str) -> Mistake:
    return (lambda: compiled(inputs=(X, Y, N), loss=loss)), words or SIZED


MISTAKES: dict[str, Mistake] = {
    # views
    "transposed": of(lambda m, x: x.view(-1, 2, 2).transpose(1, 2).view(-1, 4), *VIEWED),
    "permuted": of(lambda m, x: x.view(-1, 2, 2).permute(2, 0, 1).view(-1), *VIEWED),
    "a slice of rows": of(lambda m, x: x[:, :2].view(-1), *VIEWED),
    "expanded": of(lambda m, x: x[:, :1].expand(-1, 4).view(-1), *VIEWED),
    # tuples
    "LSTM": layers(
        nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 4),
        words=("(output, (h, c)), which 0 (an LSTM) has returned", "out, *_ = self[0](...)",
               "a forward of your own"),
    ),
    "GRU": layers(nn.Linear(4, 4), nn.GRU(4, 4), nn.ReLU(),
                  words=("(output, h), which 1 (a GRU) has returned",)),
    "two LSTMs": layers(nn.LSTM(4, 4), nn.LSTM(4, 4),
                        words=("which 0 (an LSTM) has returned",)),
    "attention": of(lambda m, x: m.down(m.attention(x, x, x)).sum(),
                    "(output, weights), which attention (a MultiheadAttention)",
                    "out, *_ = self.attention(...)", inputs=IN_TURN),
    "added": of(lambda m, x: m.attention(x, x, x) + x,
                "which attention (a MultiheadAttention)", inputs=IN_TURN),
    "its mean": of(lambda m, x: m.rnn(x).mean(), "which rnn (an LSTM) has", inputs=IN_TURN),
    "joined": of(lambda m, x: torch.cat([m.gru(x), x]), "which gru (a GRU) has", inputs=IN_TURN),
    # sizes
    "a slice": sized(lambda m, x, y, n: F.mse_loss(m(x)[:, :n], y[:, :n])),
    "a slice from": sized(lambda m, x, y, n: m(x)[n:].mean()),
    "turns": sized(lambda m, x, y, n: sum(loss_of(m, x, y) for _ in range(n))),  # type: ignore[arg-type, return-value]
    "arange": sized(lambda m, x, y, n: (m(x).sum() * torch.arange(n)).mean()),
    "zeros": sized(lambda m, x, y, n: m(x).mean() + torch.zeros(n).mean()),
    "split": sized(lambda m, x, y, n: m(x).split(n)[0].mean()),
    "new_zeros": sized(lambda m, x, y, n: m(x).mean() + x.new_zeros(n, 4).mean()),
    "expand": sized(lambda m, x, y, n: m(x)[:1].expand(n, 4).mean()),
    "int": sized(lambda m, x, y, n: m(x)[:, : int(n)].mean()),
    "a list": sized(lambda m, x, y, n: [m(x), x][n].mean(), "Which entry", "index_select"),
    # checkpoints
    "a checkpoint": of(
        lambda m, x: checkpoint(m.up, x.detach(), use_reentrant=True).sum() + x.sum(),
        "use_reentrant=True) is given tensors without a gradient", "use_reentrant=False",
        "test_layer_mistakes.py",
    ),
    "checkpoints in a row": of(
        lambda m, x: checkpoint_sequential([m.up, m.down], 2, x.detach(), use_reentrant=True),
        "use_reentrant=False",
    ),
    # layers that are made
    "a linear": of(lambda m, x: nn.Linear(4, 4)(x), "nn.Linear(4, 4)(x)", "float32[4, 4]",
                   "no optimizer trains it", "in __init__"),
    "a norm": of(lambda m, x: nn.LayerNorm(4)(x), "nn.LayerNorm(4)(x)", "affine=False"),
    "layers": of(lambda m, x: nn.Sequential(nn.Linear(4, 4), nn.ReLU())(x), "nn.Linear(4, 4)"),
    "a parameter": of(lambda m, x: x * nn.Parameter(torch.ones(4)), "float32[4]", "in __init__"),
    "a drawn one": of(
        lambda m, x: x @ nn.init.orthogonal_(nn.Parameter(torch.empty(4, 4))), "no optimizer"
    ),
    "of a weight": of(lambda m, x: x * nn.Parameter(m.down.bias * 2), "no optimizer trains it"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_layer_gets_a_sentence(mistake: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of transformers and of checkpoints
        check(MISTAKES[mistake])


def test_a_layer_that_a_model_makes_is_refused_without_gradients_too() -> None:
    model = Own(lambda m, x: nn.Linear(4, 4)(x))
    with torch.no_grad():
        check((lambda: partc.compile(model, "dp=2", (X,), plan="ddp"), ("nn.Linear(4, 4)(x)",)))


@pytest.mark.parametrize("mode", ["step", "no_grad"])
def test_what_has_no_parameters_may_be_made(mode: str) -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        y = nn.Dropout(0.0)(nn.ReLU()(x)) + nn.LayerNorm(4, elementwise_affine=False)(x)
        carried = torch.zeros(8, 4, requires_grad=True)
        frozen = nn.Linear(4, 4).requires_grad_(False)
        return y + carried + frozen(x).detach() * 0  # type: ignore[no-any-return]

    with torch.set_grad_enabled(mode == "step"):
        loss = {"loss": lambda m, x, y: nn.MSELoss()(m(x), y)} if mode == "step" else {}
        inputs = (X, Y) if mode == "step" else (X,)
        partc.compile(Own(forward), "dp=2", inputs, plan="ddp", **loss)  # type: ignore[arg-type]


def test_a_tensor_that_is_drawn_to_be_trained_is_told() -> None:
    with pytest.warns(UserWarning, match="randn.*never trained.*nn.Parameter in __init__"):
        compiled(model=Own(lambda m, x: x @ torch.randn(4, 4, requires_grad=True)))


@pytest.mark.exhaustive
def test_a_checkpoint_of_frozen_layers_is_taken() -> None:
    def forward(model: Any, x: Tensor) -> Any:
        frozen, _ = checkpoint(model.gru, x.detach(), use_reentrant=True)
        with torch.no_grad():
            y = checkpoint(model.down, model.up(x), use_reentrant=True)
        return x + y + frozen

    model = Own(forward)
    model.gru.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled(model=model)
