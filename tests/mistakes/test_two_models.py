"""A stage beside the model that it came from, and beside stages of other models."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partc.program.model.raw_model import empty_model
from tests.mistakes.things import Net, batch_of, check, compiled, loss_of, one_rank

X, Y = batch_of()


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    with one_rank():
        yield


class Around(nn.Module):
    """Another model over the same weights."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x)
        return result


def trained(model: nn.Module) -> Any:
    """A stage of the model behind one step."""
    stage = compiled(model=model, mesh="dp=1").module()
    optimizer = torch.optim.SGD(stage.parameters(), 0.1)
    assert model.state_dict()  # as it is now
    stage.step(X, Y)
    assert model.state_dict()
    optimizer.step()
    optimizer.zero_grad()
    return stage


def test_weights_that_were_trained_no_more_are_told_once() -> None:
    model = Net()
    stage = trained(model)
    with pytest.warns(UserWarning, match=r"state_dict\(\) of the model .*full_state_dict\(\)"):
        model.state_dict()
    model.state_dict()
    assert stage.full_state_dict()


def test_weights_that_were_brought_back_or_are_others_are_as_meant() -> None:
    for bring in (lambda stage: stage.full_state_dict(), lambda stage: Net().state_dict()):
        model = Net()
        model.load_state_dict(bring(trained(model)))
        model.state_dict()


def test_a_model_without_values_has_no_states() -> None:
    model = Net()
    trained(model)
    empty_model(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check((model.state_dict, ("Net.state_dict()", "no values any more")))


def test_a_teacher_and_a_second_stage_of_one_model_are_no_mistake() -> None:
    model = Net()
    stage = trained(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model(X).shape == Y.shape
        stage.load_full(model)
        compiled(model=model, mesh="dp=1").module()
        model.state_dict()


def test_stages_of_two_models_over_one_weight_are_told() -> None:
    model, outer = Net(), None
    stage = compiled(model=model, mesh="dp=1").module()
    outer = Around(model)
    with pytest.warns(UserWarning, match=r"inner.up.weight of Around is also up.weight of Net"):
        compiled(model=outer, mesh="dp=1").module()
    assert stage


@pytest.mark.exhaustive
def test_a_program_of_another_model_is_not_shared() -> None:
    program = compiled(mesh="dp=1", model=(model := Net()))
    stage = program.module()
    stage.share(program.also((X, Y), loss=loss_of))
    stage.share(compiled(model=model, mesh="dp=1"))
    own = compiled(model=(other := Net()), mesh="dp=1")
    check((lambda: stage.share(own), ("another model", "weights of its own", "program.also")))
    wide = compiled(model=Net(6), mesh="dp=1", inputs=batch_of(8, 6))
    check((lambda: stage.share(wide), ("another model", "up.weight: param float32[8, 4]")))
    assert other
