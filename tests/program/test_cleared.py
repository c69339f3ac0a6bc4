"""A loop that clears gradients between a step and its optimizer trains nothing, and is told so."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

import partc
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
