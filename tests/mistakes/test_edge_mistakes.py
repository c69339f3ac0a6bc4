"""What scripts do at the edges of a step: with what it gives back, its inputs and its noise."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import partc
from partc.program import habits
from tests.mistakes.things import Net, batch_of, check, compiled, one_rank

X, Y = batch_of()
api: Any = partc  # whose types forbid most of this


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    with one_rank():
        yield
    of_extras.cache_clear()


def with_extras(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> Any:
    result = model(x)
    far = (result - target).abs().mean()
    return nn.functional.mse_loss(result, target), {"far": far, "result": result}


@cache
def of_extras() -> Any:
    return compiled(mesh="dp=1", loss=with_extras).module()


def on_extras(train: Callable[[Any, Any], Any]) -> Callable[[], Any]:
    return lambda: train(*of_extras()(X, Y))


@pytest.mark.parametrize(
    "train",
    [
        lambda loss, extras: extras["far"].backward(),
        lambda loss, extras: extras["far"].mean().mul(2).backward(),
        lambda loss, extras: nn.functional.mse_loss(extras["result"], Y).backward(),
        lambda loss, extras: (loss + 0.1 * extras["far"]).backward(),
        lambda loss, extras: (extras["result"].square().mean() - loss).backward(),
        lambda loss, extras: (extras["far"] + loss).backward(),
        lambda loss, extras: torch.stack([loss, extras["far"]]).sum().backward(),
        lambda loss, extras: torch.autograd.grad(extras["far"], list(of_extras().parameters())),
    ],
)
def test_what_stands_beside_the_loss_is_not_trained_on(train: Callable[[Any, Any], Any]) -> None:
    check((on_extras(train), ("gives beside its loss", "return loss + aux", "program.also")))


def test_what_stands_beside_the_loss_is_as_any_tensor_without_a_gradient() -> None:
    loss, extras = of_extras()(X, Y)
    head = nn.Linear(4, 1)
    (loss / extras["far"] + head(extras["result"]).mean() + extras["far"].detach()).backward()
    assert head.weight.grad is not None
    assert extras["result"].numpy().shape == (8, 4)
    assert type(pickle.loads(pickle.dumps(extras["far"]))) is torch.Tensor
    assert f"{extras['far']:.2f}" == f"{float(extras['far']):.2f}"


def test_an_input_that_waits_for_a_gradient_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = compiled(mesh="dp=1").module()
    for x, words in (
        (X.clone().requires_grad_(), "x has requires_grad, and x.grad stays"),
        (X.clone().requires_grad_() * 2, "x was computed by what has requires_grad"),
    ):
        monkeypatch.setattr(habits, "TOLD", set())
        with pytest.warns(UserWarning, match=words):
            mine.step(x, Y)
        mine.step(x, Y)
        mine.eval_step(x, Y)


def slope(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    u = model(x)
    du = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
    return (du - target).square().mean()


def test_an_input_by_which_the_step_itself_takes_derivatives_is_not_told(tmp_path: Path) -> None:
    x = X.clone().requires_grad_()
    found = compiled(mesh="dp=1", loss=slope, inputs=(x, Y))
    found.module().step(x, Y)
    found.save(tmp_path)
    loaded = partc.load(tmp_path).module()
    loaded.load_full(Net())
    loaded.step(x, Y)


class Drops(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.dropout(x))


def test_a_generator_of_torch_that_is_seeded_between_steps_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(habits, "TOLD", set())
    mine = compiled(mesh="dp=1", model=Drops()).module()
    for _ in range(2):
        torch.randn(3)
        mine.step(X, Y)
        with torch.random.fork_rng():
            torch.manual_seed(3)
    torch.manual_seed(7)
    mine.seed(7)
    mine.step(X, Y)
    torch.randn(3)
    mine.step(X, Y)
    assert "stage.seed" not in caplog.text
    for _ in range(2):
        torch.manual_seed(7)
        mine.step(X, Y)
    assert caplog.text.count("stage.seed(seed)") == 1
