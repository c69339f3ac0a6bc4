"""A saved program is loaded with a model of the same tensors: one that computes something else is
named.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import partc


class Block(nn.Module):
    def __init__(self, act: nn.Module | None = None, scale: float = 1.0) -> None:
        super().__init__()
        self.w, self.act, self.scale = nn.Linear(8, 8), act or nn.GELU(), scale

    def forward(self, x: Tensor) -> Tensor:
        """The first one."""
        self.seen = len(x)
        y: Tensor = self.act(self.w(x)) * self.scale * (self.seen > 0)
        return y


def rewritten(self: Block, x: Tensor) -> Tensor:
    y: Tensor = self.act(self.w(x)) + self.scale
    return y


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return mse_loss(model(x), y)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "program"
    batch = torch.randn(4, 8), torch.randn(4, 8)
    partc.compile(nn.Sequential(Block()), "dp=2", batch, loss=loss_of, plan="ddp").save(path)
    return path


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Block(nn.ReLU()), "0.act: GELU approximate='none' compiled, ReLU"),
        (lambda: Block(nn.GELU("tanh")), "0.act: GELU approximate='none' compiled, GELU approx"),
        (lambda: Block(scale=0.5), "0: Block scale=1.0 compiled, Block scale=0.5 given"),
        (lambda: type("Other", (Block,), {})(), "0: Block scale=1.0 compiled, Other scale=1.0"),
    ],
)
def test_a_model_that_computes_something_else_is_named(
    saved: Path, make: Callable[[], nn.Module], said: str
) -> None:
    model = nn.Sequential(make())
    with pytest.warns(UserWarning, match="has changed since the program was compiled") as found:
        partc.with_model(partc.load(saved, model), model, loss_of)
    assert [said in str(each.message) for each in found] == [True, True]


def test_code_that_was_rewritten_is_named(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Block, "forward", rewritten)
    with pytest.warns(UserWarning, match="0: the code of Block has changed"):
        partc.load(saved, nn.Sequential(Block()))


def test_the_same_model_is_no_other_one(saved: Path) -> None:
    model = nn.Sequential(Block())
    model(torch.randn(4, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        partc.with_model(partc.load(saved, model), model, loss_of)
