"""A loop that clears gradients between a step and its optimizer trains nothing, and is told so."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import partc
from partc.program.model import habits
from partc.program.optimizer import cleared
from partc.program.stage.runtime import Stage
from tests.mistakes.things import one_rank
from tests.program.training import batch_of, loss_of, model_of

Clear = Callable[[torch.optim.Optimizer, Stage], None]


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    with one_rank():
        yield


def stage_of() -> Stage:
    return partc.compile(model_of(), "dp=1", batch_of(), loss=loss_of, plan="ddp").module()


CLEAR: dict[str, Clear] = {
    "the optimizer's": lambda optimizer, stage: optimizer.zero_grad(),
    "to zeros": lambda optimizer, stage: optimizer.zero_grad(set_to_none=False),
    "the stage's": lambda optimizer, stage: stage.zero_grad(),
}


@pytest.mark.parametrize("way", CLEAR)
def test_gradients_that_are_cleared_behind_a_step_are_told_once(way: str) -> None:
    stage = stage_of()
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            stage.step(*batch_of())
            CLEAR[way](optimizer, stage)
            optimizer.step()
    texts = [str(each.message) for each in told]
    assert len([text for text in texts if "SGD.step() finds no gradient" in text]) == 1


def test_gradients_that_are_zeros_are_not_cleared() -> None:
    """Before a last layer that starts at 0, as that of a diffusion transformer, all are 0."""
    model = model_of()
    last = [*model.parameters()][-2:]
    for param in last:
        nn.init.zeros_(param)
    stage = partc.compile(model, "dp=1", batch_of(), loss=loss_of, plan="ddp").module()
    params = dict(stage.named_parameters())
    ends = [params.pop(name) for name, _ in [*model.named_parameters()][-2:]]
    optimizers = [torch.optim.SGD(each, lr=0.1) for each in (params.values(), ends)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            optimizers[0].zero_grad()
            optimizers[1].zero_grad()
            stage.step(*batch_of())
            torch.nn.utils.clip_grad_norm_(ends, 1.0)
            optimizers[0].step()
            optimizers[1].step()


@pytest.mark.exhaustive
@pytest.mark.parametrize("style", ["step", "backward", "skipped"])
def test_loops_that_train_are_not_told(style: str) -> None:
    stage = stage_of()
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for num in range(cleared.LOOKED_AT + 1):
            if style == "backward":
                loss = stage(*batch_of())
                optimizer.zero_grad()
                loss.backward()
            else:
                optimizer.zero_grad()
                stage.step(*batch_of())
            if style != "skipped" or num % 2:  # as a scaler skips the steps of infinite gradients
                optimizer.step()


def test_a_loop_without_a_backward_is_told_once() -> None:
    stage = stage_of()
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            optimizer.zero_grad()
            stage(*batch_of())
            optimizer.step()
    texts = [str(each.message) for each in told]
    assert len([text for text in texts if "no backward() was called" in text]) == 1


@pytest.mark.exhaustive
def test_a_closure_that_calls_backward_is_told_nothing() -> None:
    stage = stage_of()
    optimizer = torch.optim.LBFGS(stage.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = stage(*batch_of())
        loss.backward()
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            stage(*batch_of())
            optimizer.step(closure)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("divide", "scale", "is_told"), [(2, None, True), (2, 0.5, False), (10, None, False)]
)
def test_losses_that_are_divided_in_vain_are_told_once(
    divide: int, scale: float | None, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(habits, "TOLD", set())
    stage = stage_of()
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(2):
                loss = stage.step(*batch_of(), scale=scale) / divide
            optimizer.step()
    assert loss.isfinite()
    texts = [str(each.message) for each in told]
    assert len([text for text in texts if "scale=1 / 2" in text]) == is_told
