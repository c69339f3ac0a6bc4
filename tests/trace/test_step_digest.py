"""A step's digest changes with whatever changes the step, and with nothing else."""

from __future__ import annotations

import copy
import ctypes
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from partc.errors import TraceError
from partc.trace.record import Source
from partc.trace.step_digest import NoDigest, seen

HELPER = types.ModuleType("helper_of_a_script")
exec("RATE = 0.5\ndef scaled(x, by=2.0):\n    return x * by * RATE\n", vars(HELPER))
OPTIONS: dict[str, Any] = {"temperature": 1.0, "numbers": np.array([1.0, 2.0])}
C_NUMBER = ctypes.c_float(0.25)
Loss = Callable[..., Any]


class Gate(nn.Module):
    """Has what an edit may change: an attribute, a property, a buffer, a choice by a constant."""

    mask: Tensor
    width = 3.0

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.calls = 0.5, 0
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0, 1.0]))

    @property
    def factor(self) -> float:
        return self.scale * 2

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.mask * self.factor + self.width
        return y if self.mask.numel() > 3 else -y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.gate = nn.Linear(4, 4), nn.GELU(), Gate()
        self.drop, self.last = nn.Dropout(0.1), nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4)
        self.unread = "a note"

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.second(self.gate(self.act(self.drop(self.first(x))))))
        return y


class Doubled(torch.autograd.Function):
    rate = 2.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * Doubled.rate


BIG = torch.zeros(1 << 19)  # 2 MB: more than the tracer keeps of a constant


def loss_with(weight: float, power: float = 2.0) -> Loss:
    def loss(model: nn.Module, x: Tensor) -> Any:
        y = HELPER.scaled(model(x)) / OPTIONS["temperature"] * weight
        y = Doubled.apply(y)  # type: ignore[no-untyped-call]
        y = y + float(OPTIONS["numbers"].sum()) + C_NUMBER.value
        y = y + BIG[:4] * float(os.environ.get("SCRIPT_RATE", "1"))
        return (y**power).mean()

    return loss


BASE = loss_with(1.5)


def digest(
    change: Callable[[Net], Any] | None = None, loss: Loss = BASE, rows: int = 8, seed: int = 0
) -> str:
    torch.manual_seed(seed)
    model = Net()
    changed = change(model) if change else None
    model = changed if isinstance(changed, Net) else model
    return seen(Source.of(model, (torch.randn(rows, 4),), loss), fold=True).digest


def patched(model: Net) -> None:
    model.gate.forward = lambda x: Gate.forward(model.gate, x) * 1.0  # type: ignore[method-assign]


def with_attribute(path: str, name: str, value: Any) -> Callable[[Net], None]:
    return lambda model: setattr(model.get_submodule(path), name, value)


def tied(model: Net) -> None:
    model.last.weight = model.first.weight


def hooked(model: Net) -> None:
    model.gate.register_forward_hook(lambda module, args, result: result * 2)


def gradient_hooked(model: Net) -> None:
    model.first.weight.register_hook(lambda grad: grad * 2)


def unsaved(model: Net) -> None:
    model.gate.register_buffer("mask", model.gate.mask, persistent=False)


def other_class(model: Net) -> None:
    class Louder:
        @property
        def factor(self) -> float:
            return 4.0

    model.gate.__class__ = type("LouderGate", (Louder, Gate), {})


def casting(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        loss: Tensor = BASE(model, x)
        return loss


EDITS: dict[str, Callable[[Net], Any]] = {
    "an attribute of a submodule": with_attribute("gate", "scale", 0.25),
    "a class attribute": lambda model: setattr(type(model.gate), "width", 2.0),
    "a buffer's value": lambda model: model.gate.mask.fill_(1.0),
    "a buffer that is not saved": unsaved,
    "a method of the instance": patched,
    "a forward hook": hooked,
    "a gradient hook": gradient_hooked,
    "the rate of dropout": with_attribute("drop", "p", 0.2),
    "a module exchanged": with_attribute("", "act", nn.SiLU()),
    "an option of a module": with_attribute("", "act", nn.GELU("tanh")),
    "the order of classes": other_class,
    "eval mode": lambda model: model.eval(),
    "a frozen parameter": lambda model: model.first.requires_grad_(False) and None,
    "a dtype": lambda model: model.double(),
    "a tied parameter": tied,
    "a global of a helper": lambda model: setattr(HELPER, "RATE", 0.75),
    "a default of a helper": lambda model: setattr(HELPER.scaled, "__defaults__", (3.0,)),
    "a number in a global dict": lambda model: OPTIONS.update(temperature=2.0),
    "a numpy constant": lambda model: OPTIONS.update(numbers=np.array([1.0, 3.0])),
    "a number in C": lambda model: setattr(C_NUMBER, "value", 0.5),
    "one number of a big constant": lambda model: BIG[1].fill_(1.0) and None,
    "the backward of a function": lambda model: setattr(Doubled, "rate", 3.0),
    "the environment": lambda model: os.environ.update(SCRIPT_RATE="2"),
}


@pytest.fixture(scope="module")
def before() -> str:
    return digest()


@pytest.fixture
def restored() -> Any:
    width, defaults, rate = Gate.width, HELPER.scaled.__defaults__, Doubled.rate
    options, number, big = dict(OPTIONS), C_NUMBER.value, BIG.clone()
    yield
    Gate.width, HELPER.scaled.__defaults__, Doubled.rate = width, defaults, rate
    HELPER.RATE, C_NUMBER.value = 0.5, number  # type: ignore[attr-defined]
    OPTIONS.update(options)
    BIG.copy_(big)
    os.environ.pop("SCRIPT_RATE", None)


@pytest.mark.rows(8)
@pytest.mark.parametrize("name", EDITS)
@pytest.mark.usefixtures("restored")
def test_an_edit_changes_the_digest(name: str, before: str) -> None:
    assert digest(EDITS[name]) != before


def losses() -> Iterator[Loss]:
    """Losses of which several stand on one line, so that their text says nothing."""
    yield from (loss_with(1.25), loss_with(1.5, power=3.0), casting)
    for factor in (2.0, 3.0):
        yield partial(lambda k, model, x: BASE(model, x) * k, factor)
    for name in ("first.weight", "second.weight"):
        yield lambda model, x, name=name: BASE(model, x) + model.get_parameter(name).sum()
    for part in (torch.relu, torch.detach):
        yield lambda model, x, part=part: BASE(model, x) + part(model(x)).mean()
    for extras in ({"a": 0}, {"b": 0}, {"b": 1}):
        yield lambda model, x, extras=extras: (BASE(model, x), {"rows": x.sum(), **extras})
    for last in (4.0, 5.0):
        yield lambda model, x, last=last: BASE(model, x * torch.tensor([1.0, 2.0, 3.0, last]))


@pytest.mark.exhaustive
def test_losses_differ(before: str) -> None:
    found = [before, *(digest(loss=loss) for loss in losses()), digest(rows=9)]
    assert len({*found}) == len(found)


@pytest.mark.exhaustive
def test_what_does_not_matter_changes_nothing(before: str) -> None:
    assert digest(seed=1) == before  # other weights, other inputs
    assert digest(copy.deepcopy) == before
    assert digest(with_attribute("", "unread", "another note")) == before
    code = f"import {__name__} as test; print(test.digest())"
    path = os.pathsep.join(sys.path)  # lines are named after it
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": path}
    told = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert told.stdout.strip() == before


def test_a_second_step_that_differs_has_no_digest() -> None:
    def counted(model: nn.Module, x: Tensor) -> Tensor:
        OPTIONS["calls"] = OPTIONS.get("calls", 0) + 1
        loss: Tensor = BASE(model, x) * (2.0 if OPTIONS["calls"] > 1 else 1.0)
        return loss

    with pytest.raises(TraceError, match="second step"):
        digest(loss=counted)
    OPTIONS.pop("calls", None)


def test_numbers_of_constants_are_known() -> None:
    """As they are while recording, where the graph says how a constant was computed."""

    def with_limit(limit: int) -> Loss:
        return lambda model, x: (
            BASE(model, x) * (torch.arange(5).roll(1).cumsum(0) > limit).sum().item()
        )

    assert digest(loss=with_limit(3)) != digest(loss=with_limit(4))


@pytest.mark.exhaustive
def test_equal_blocks_are_run_once() -> None:
    def stack(depth: int, last: float) -> str:
        layers = [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)) for _ in range(depth)]
        layers[-2][1].p = last  # type: ignore[assignment]
        model = nn.Sequential(nn.ModuleList(layers)[0], *layers[1:])
        model.layers = nn.ModuleList(layers)

        def loss(model: nn.Module, x: Tensor) -> Tensor:
            for layer in model.layers:  # type: ignore[union-attr]
                x = layer(x)
            return F.mse_loss(x, x.detach() * 2)

        return seen(Source.of(model, (torch.randn(2, 4),), loss), fold=True).digest

    assert stack(20, 0.1) == stack(20, 0.1) != stack(21, 0.1)
    assert stack(20, 0.2) != stack(20, 0.1)


def test_an_op_of_somebody_has_no_digest() -> None:
    @torch.library.custom_op("digests::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    @twice.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    twice.register_autograd(lambda ctx, grad: grad * 2)
    with pytest.raises(NoDigest, match=r"digests\.twice"):
        digest(loss=lambda model, x: twice(model(x)).mean())
