"""Tensors from outside of a step: parameters as such, constants by name, trained ones refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import partc
from partc.errors import TraceError
from partc.lowering import trace
from partc.plan import Plan
from tests.compare import check

BATCH = torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
WEIGHTS = torch.rand(4, dtype=torch.float64)
FROZEN = "frozen at trace time, whole on every rank: "


def model_of() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4)).double()


def distance(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


@pytest.mark.exhaustive
def test_a_parameter_in_a_variable_is_the_parameter() -> None:
    """As of elastic weight consolidation: distances of the weights from what they were."""
    model = model_of()
    weights = list(model.parameters())
    before = [weight.detach().clone() for weight in weights]

    def loss(model: Any, x: Tensor, y: Tensor) -> Any:
        pairs = zip(weights, before, strict=True)
        return distance(model, x, y) + sum((a - b + 1).square().sum() for a, b in pairs)

    check(model, BATCH, loss)
    model.zero_grad()
    for mesh, plan in (("dp=2", "fsdp"), ("dp=2,tp=2", "fsdp+megatron")):
        program = partc.compile(model, mesh, BATCH, loss=loss, plan=plan)
        partc.verify(program, model, BATCH, loss).check(1e-12)
        assert Plan.parse(program.plan).notes == (f"{FROZEN}4 tensors in before of loss, 736 B",)
    assert [weight.grad for weight in weights] == [None] * 4


class Tables(nn.Module):
    """Has tensors in plain attributes and modules in a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4).double()
        self.scale = torch.rand(4, dtype=torch.float64)
        self.heads = [nn.Linear(4, 4).double().requires_grad_(False)]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.heads[0](self.linear(x) * self.scale)
        return y


def test_constants_are_named() -> None:
    limits = {"most": 0.5}

    def loss(model: Any, x: Tensor, y: Tensor) -> Any:
        return (WEIGHTS * (model(x) - y).clamp(max=limits["most"])).mean()

    notes = check(Tables(), BATCH, loss).frozen
    lines = [note.partition(", read at ")[0] for note in notes]
    assert sorted(lines) == [
        f"{FROZEN}WEIGHTS of loss, f64[4], 32 B",
        f"{FROZEN}model.heads[0].bias, f64[4], 32 B",
        f"{FROZEN}model.heads[0].weight, f64[4,4], 128 B",
        f"{FROZEN}model.scale, f64[4], 32 B",
        "frozen at trace time: limits['most'] of loss, 0.5",
    ]
    assert all("test_closed_over.py:" in note for note in notes if "f64" in note)


def test_numbers_written_in_the_step_are_no_constants_from_outside() -> None:
    def loss(model: Any, x: Tensor, y: Tensor) -> Any:
        return (model(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])).mean()

    assert check(model_of(), BATCH, loss).frozen == ()


def test_a_teacher_is_constant_where_its_gradient_is_not_wanted() -> None:
    teacher = model_of()

    def loss(model: Any, x: Tensor, y: Tensor) -> Any:
        return F.mse_loss(model(x) * 2, teacher(x).detach())

    program = partc.compile(model_of(), "dp=2", BATCH, loss=loss, plan="fsdp")
    partc.verify(program, model_of(), BATCH, loss).check(1e-12)
    assert Plan.parse(program.plan).notes == (f"{FROZEN}4 tensors in teacher of loss, 736 B",)

    def trained(model: Any, x: Tensor, y: Tensor) -> Any:
        return F.mse_loss(model(x), teacher(x))

    with pytest.raises(TraceError, match=r"^teacher\.2\..* of trained: .*that is no parameter"):
        trace(model_of(), BATCH, trained)


def test_a_penalty_on_a_gradient_makes_its_own_leaf() -> None:
    def loss(model: Any, x: Tensor, y: Tensor) -> Any:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
        return distance(model, x, y) + slope.square().mean()

    check(model_of(), BATCH, loss)


def test_what_a_step_updates_in_place_is_a_buffer_or_refused() -> None:
    teacher = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)).double().requires_grad_(False)
    mean, scratch = torch.zeros(4, dtype=torch.float64), torch.zeros(8, 4, dtype=torch.float64)

    def taught(model: Any, x: Tensor, y: Tensor) -> Any:
        return F.mse_loss(model(x), teacher(x))

    def averaged(model: Any, x: Tensor, y: Tensor) -> Any:
        mean.mul_(0.9).add_(y.mean(0))
        return (model(x) - mean).square().mean()

    def filled(model: Any, x: Tensor, y: Tensor) -> Any:
        scratch.copy_(y)
        return F.mse_loss(model(x), scratch * 2)

    with pytest.raises(TraceError, match=r"^teacher\.1\..* of taught .*updates it in place"):
        trace(model_of(), BATCH, taught)
    trace(model_of(), BATCH, lambda m, x, y: (teacher.eval(), taught(m, x, y))[1])
    with pytest.raises(TraceError, match=r"^mean of averaged .*updates it in place"):
        trace(model_of(), BATCH, averaged)
    notes = check(model_of(), BATCH, filled).frozen
    assert notes == ("the step writes into scratch of filled; a program does not",)


def alias(model: Any) -> Callable[..., Tensor]:
    weight = model[0].weight.detach()
    return lambda m, x, y: distance(m, x, y) * weight.sum()


def part(model: Any) -> Callable[..., Tensor]:
    row = model[0].weight[0]
    return lambda m, x, y: distance(m, x, y) * row.sum()


def in_a_recomputation(model: Any) -> Callable[..., Tensor]:
    weight = model[0].weight

    def inner(x: Tensor) -> Tensor:
        return F.linear(x, weight).tanh()

    return lambda m, x, y: distance(m, x, y) * checkpoint(inner, x, use_reentrant=False).mean()


@pytest.mark.parametrize("loss", [alias, part, in_a_recomputation])
def test_what_would_not_follow_a_parameter_is_refused(
    loss: Callable[[Any], Callable[..., Tensor]],
) -> None:
    model = model_of()
    with pytest.raises(TraceError, match=r"0\.weight") as caught:
        trace(model, BATCH, loss(model))
    assert "Read 0.weight itself" in caught.value.do or "inside of the loss" in caught.value.do


class Shares(nn.Module):
    """Two names over memory that may overlap."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        whole = torch.randn(6, 8, dtype=torch.float64)
        self.a = nn.Parameter(whole[:, :4])
        if kind == "buffer":
            self.register_buffer("b", self.a.data[1:])
        else:
            self.b = nn.Parameter(whole[:, 4:] if kind == "apart" else whole[:, 3:7])

    def forward(self, x: Tensor) -> Tensor:
        return x[:, : len(self.b)] @ self.b + x @ self.a


@pytest.mark.parametrize("kind", ["buffer", "parameter", "apart"])
def test_parameters_have_their_memory_to_themselves(kind: str) -> None:
    def loss(model: Any, x: Tensor, y: Tensor) -> Any:
        return F.mse_loss(model(x), y)

    if kind == "apart":
        check(Shares(kind), BATCH, loss)
        return
    with pytest.raises(TraceError, match=r"^b: it shares memory with a, and one is trained"):
        trace(Shares(kind), BATCH, loss)
