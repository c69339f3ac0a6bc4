"""Parameters that graphs of autograd hold from before a model's first step: nobody trains them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import spectral_norm, weight_norm

import partc
from partc.errors import RunError
from partc.wrappers.kept import counts_graphs, held_by_graphs
from tests.mistakes.things import one_rank

X = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*weight_norm:FutureWarning",
    "ignore:.*torch.jit:DeprecationWarning",
    "ignore:partc. the script keeps:UserWarning",
)


class Net(nn.Module):
    """Its first layer may have a weight that is computed, as an attribute, from parameters."""

    def __init__(self, norm: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.head = norm(nn.Linear(4, 4)), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.first(x).tanh())
        return y


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def made(norm: Callable[..., Any]) -> nn.Module:
    torch.manual_seed(0)
    return Net(norm).double()


def trained(model: Any, step: Callable[[Tensor], Tensor]) -> list[float]:
    """The losses of steps on two shapes."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for rows in (8, 8, 4):
        optimizer.zero_grad()
        found.append(float(step(X[:rows]).detach()))
        optimizer.step()
    return found


def alone(model: nn.Module) -> list[float]:
    def step(x: Tensor) -> Tensor:
        loss = mean_square(model, x)
        loss.backward()
        return loss

    return trained(model, step)


@pytest.mark.exhaustive
@pytest.mark.parametrize("norm", [weight_norm, spectral_norm, nn.Sequential])
def test_a_kept_model_whose_weights_are_computed(norm: Callable[..., Any]) -> None:
    with one_rank():
        kept = made(norm)
        model: Any = partc.parallelize(kept, "dp=1", loss=mean_square, plan="ddp")
        assert trained(model, model.step) == pytest.approx(alone(made(norm)), rel=1e-12)
        assert kept is not model


@pytest.mark.exhaustive
def test_a_result_from_before_the_first_step_is_not_differentiated() -> None:
    with one_rank():
        whole = made(nn.Sequential)
        model: Any = partc.parallelize(whole, "dp=1", loss=mean_square, plan="ddp")
        before = mean_square(whole, X)
        assert trained(model, model.step) == pytest.approx(alone(made(nn.Sequential)), rel=1e-12)
        with pytest.raises(RunError, match=r"backward: .*before the model's first step"):
            before.backward()


@pytest.mark.exhaustive
def test_a_tuple_is_named_beside_a_graph() -> None:
    with one_rank():
        whole = made(nn.Sequential)
        model: Any = partc.parallelize(whole, "dp=1", loss=mean_square, plan="ddp")
        before, weights = mean_square(whole, X), (*whole.parameters(),)
        with pytest.raises(RunError, match="the script keeps this parameter"):
            model.step(X)
        assert before.requires_grad
        assert weights


def test_a_traced_module_is_named() -> None:
    with one_rank():
        whole = made(nn.Sequential)
        model: Any = partc.parallelize(whole, "dp=1", loss=mean_square, plan="ddp")
        script = torch.jit.trace(whole, X)
        with pytest.raises(RunError, match="the script keeps this parameter"):
            model.step(X)
        assert script is not whole


class Noisy:
    """Warns when it is looked at, as ``torch.distributed.reduce_op`` does."""

    def __getattribute__(self, name: str) -> Any:
        warnings.warn(f"{name} is deprecated", FutureWarning, stacklevel=2)
        return object.__getattribute__(self, name)


@pytest.mark.exhaustive
def test_looking_for_who_keeps_a_parameter_wakes_no_warnings_of_others() -> None:
    with one_rank(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        noisy, whole = [Noisy()], made(nn.Sequential)
        model: Any = partc.parallelize(whole, "dp=1", loss=mean_square, plan="ddp")
        weights = (*whole.parameters(),)
        with pytest.raises(RunError, match="the script keeps this parameter"):
            model.step(X)
        assert len(noisy) == 1
        assert weights
    assert [str(each.message) for each in told if each.category is FutureWarning] == []


class Child(nn.Module):
    """A part that knows its whole."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "whole", whole)

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_read", [True, False])
def test_a_model_is_kept_by_a_variable_that_a_later_line_reads(is_read: bool) -> None:
    def first_step() -> None:
        whole = made(nn.Sequential)
        whole.child = Child(whole)
        model: Any = partc.parallelize(whole, "dp=1", loss=mean_square, plan="ddp")
        if not is_read:
            model.step(X)
            return
        model.step(X)
        assert whole is not model

    with one_rank(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        first_step()
    own = [each for each in told if "the script keeps the Net" in str(each.message)]
    assert len(own) == is_read
    assert {Path(each.filename).name for each in own} <= {Path(__file__).name}


def test_graphs_are_told_from_other_holders() -> None:
    trained, frozen = (nn.Parameter(torch.ones(2), requires_grad=train) for train in (True, False))
    assert held_by_graphs(trained) == held_by_graphs(frozen) == 0
    result = trained * frozen
    assert held_by_graphs(trained) == held_by_graphs(frozen) == int(counts_graphs())
    del result
    assert held_by_graphs(trained) == held_by_graphs(frozen) == 0
