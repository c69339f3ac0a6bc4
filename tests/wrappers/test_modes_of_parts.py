"""Modes in scripts: parts that are put into eval mode, and an evaluation that comes first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partc
from partc.errors import RunError
from partc.verification.processes import Processes
from tests.wrappers.test_habits_of_scripts import X, check, mean_square, trained

Losses = list[float]


def made() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.BatchNorm1d(8))
    return net.append(nn.Linear(8, 4)).double()


def parallel(**given: Any) -> Any:
    return partc.parallelize(made(), "dp=2", plan="fsdp", batch="global", **given)


def epochs(model: Any, step: Callable[[], Tensor]) -> Losses:
    """Two epochs in which the first of two batch norms keeps its statistics, as in fine-tuning."""
    found = []
    for _ in range(2):
        model.train()
        model[1].eval()
        found += trained(model, step)
        model.eval()
        with torch.no_grad():
            found.append(float(mean_square(model, X)))
    return found


def by_backward(model: nn.Module) -> Callable[[], Tensor]:
    def step() -> Tensor:
        loss = mean_square(model, X)
        loss.backward()
        return loss

    return step


def parts() -> None:
    alone = made()
    wanted = epochs(alone, by_backward(alone))
    model = parallel(loss=mean_square)
    check(epochs(model, lambda: model.step(X)), wanted)
    model = parallel()
    check(epochs(model, by_backward(model)), wanted)


@pytest.mark.exhaustive
@pytest.mark.gloo
def test_parts_keep_the_mode_that_the_script_gave_them(world: Processes) -> None:
    world.run(parts, num=2)


def all_in_eval() -> None:
    """A script that trains without dropout and statistics of the batch, as fine-tuning may."""
    alone, model = made().eval(), parallel()
    model.eval()
    with torch.no_grad():
        model(X)
    with pytest.raises(RunError, match=r"for part in model\.children\(\): part\.eval\(\)"):
        mean_square(model, X).backward()
    model.train()
    for part in model.children():
        part.eval()
    check(trained(model, by_backward(model)), trained(alone, by_backward(alone)))


@pytest.mark.gloo
def test_a_model_trains_with_all_of_its_parts_in_eval_mode(world: Processes) -> None:
    world.run(all_in_eval, num=2)


def evaluated_first() -> int:
    """How many programs a script has that evaluates before it trains."""
    alone, model = made(), parallel(loss=mean_square)
    for each in (alone, model):
        each.eval()
    with torch.no_grad():
        first = float(mean_square(alone, X))
    check([float(model.eval_step(X))], [first])
    for each in (alone, model):
        each.train()
    check(trained(model, lambda: model.step(X)), trained(alone, by_backward(alone)))
    check([float(model.eval_step(X))], [float(mean_square(alone.eval(), X).detach())])
    return len(model._stage._own.members)


@pytest.mark.gloo
def test_an_evaluation_that_comes_first_costs_no_program(world: Processes) -> None:
    assert world.run(evaluated_first, num=2) == [2, 2]


def frozen_later() -> None:
    model = parallel(loss=mean_square)
    model.eval()
    model.eval_step(X)
    model.train()
    model[1].eval()
    with pytest.raises(RunError, match=r"1: it is in eval mode|refused to begin"):
        model.step(X)


@pytest.mark.gloo
def test_a_part_that_is_frozen_behind_the_first_evaluation_is_refused(world: Processes) -> None:
    world.run(frozen_later, num=2)
