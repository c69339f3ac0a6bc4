"""Mistakes inside of a forward: the answer names the user's line, and says what to do instead."""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn

from tests.mistakes.things import Mistake, Net, batch_of, check, compiled, one_rank

X, Y = batch_of()
OWN = random.Random(0)


class Inner(Net):
    """A model with a module of the user's inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Net()


class Drawn(Inner):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * random.random()  # type: ignore[no-any-return]


class DrawnByNumpy(Inner):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * float(np.random.rand())  # type: ignore[no-any-return]


class Whole(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.randint(1, 5)


class Chosen(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.choice([0.5, 0.7])


class OfItsOwn(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * OWN.random()


class Summed(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        dist.all_reduce(y)
        return y


class Waits(Net):
    def forward(self, x: Tensor) -> Tensor:
        dist.barrier()
        return super().forward(x)


class SummedOnTheSide(Net):
    def forward(self, x: Tensor) -> Tensor:
        group: Any = "0"
        return functional.all_reduce(super().forward(x), "sum", group)  # type: ignore[no-any-return]


class PerRank(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / dist.get_world_size()


class Normed(Net):
    """With statistics of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))  # type: ignore[assignment]


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    right: Tensor = model(x).argmax(-1) == y.argmax(-1)
    return right.float().mean()


def of(model: type[nn.Module], *words: str) -> Mistake:
    return (lambda: compiled(model=model())), ("test_forward_mistakes.py", *words)


MISTAKES: dict[str, Mistake] = {
    "behind a module": of(Drawn, "self.inner(x) * random.random()", "it draws from random"),
    "numpy": of(DrawnByNumpy, "self.inner(x) * float(np", "it draws from numpy.random"),
    "a whole number": of(Whole, "random.randint(1, 5)", "it draws from random", "torch.where"),
    "a choice": of(Chosen, "random.choice([0.5, 0.7])", "it draws from random"),
    "a generator": of(OfItsOwn, "OWN.random()", "a generator of one's own", "draw with torch"),
    "a sum over ranks": of(Summed, "dist.all_reduce(y)", "torch.distributed.all_reduce", "Leave"),
    "a barrier": of(Waits, "dist.barrier()", "torch.distributed.barrier", "Leave the call out"),
    "a functional sum": of(SummedOnTheSide, "torch.distributed.all_reduce", "Leave the call out"),
}


@pytest.fixture(params=["alone", "no group"])
def group(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "no group":
        yield
        return
    with one_rank():
        yield


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_a_sentence(mistake: str, group: None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of functions that it is about to remove
        check(MISTAKES[mistake])


def test_what_a_step_asks_of_the_process_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with one_rank(), caplog.at_level(logging.WARNING):
        program: Any = compiled(model=PerRank(), mesh="dp=1")
        program.module()
    told = [r.getMessage() for r in caplog.records]
    assert any("torch.distributed.get_world_size" in t and "get_world_size()" in t for t in told)
    assert any("need no division by the number of ranks: leave the call out" in t for t in told)
    assert "the answer that was given when it was compiled" in program.plan


def test_an_accuracy_is_no_loss() -> None:
    words = ("no trainable parameter", "argmax", "(an accuracy)", "F.cross_entropy")
    check((lambda: compiled(loss=accuracy), words))


def test_statistics_of_microbatches_are_told_with_what_helps() -> None:
    with pytest.warns(UserWarning, match="microbatches=2: BatchNorm .* one microbatch, or another"):
        compiled(model=Normed(), microbatches=2)


def test_torch_calls_are_as_they_were_behind_a_trace() -> None:
    with one_rank():
        check(MISTAKES["a sum over ranks"])
        y = torch.ones(2)
        dist.all_reduce(y)
        assert dist.get_world_size() == 1
