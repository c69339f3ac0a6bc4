"""Gradients by an input of a stage in eval mode, as an adversarial example takes them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.errors import RunError
from partc.verification.processes import Processes
from tests.mistakes.things import one_rank

pytestmark = pytest.mark.gloo


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 5), nn.Dropout(0.5))


def loss_of(model: nn.Module, input: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(input), y)


def batch() -> tuple[Tensor, Tensor]:
    return torch.linspace(-1, 1, 64).view(8, 8).requires_grad_(), torch.arange(8) % 5


def test_what_an_attack_in_eval_mode_is_told() -> None:
    x, y = batch()
    with one_rank():
        kept = model()
        stage = partc.compile(kept, "dp=1", (x.detach(), y), loss=loss_of).module().eval()
        with pytest.raises(RunError, match="an input waits for one") as caught:
            F.cross_entropy(stage(x), y).backward()
        assert 'loss=partc.ScriptLoss(model, ["x"])' in caught.value.do
        with pytest.raises(RunError, match="an input waits for one"):
            torch.autograd.grad(F.cross_entropy(stage(x), y), x)
        with pytest.raises(RunError, match="without gradients \\("):
            F.cross_entropy(stage(x.detach()), y).backward()


def attacked() -> None:
    """The advice, on the weights of a stage that has trained."""
    x, y = batch()
    trained = model()
    stage = partc.compile(trained, "dp=2", (x.detach(), y), loss=loss_of, plan="fsdp").module()
    other = model().eval()
    loss = partc.ScriptLoss(other, ["input"])
    attack = partc.compile(other, "dp=2", (x.detach(),), loss=loss, plan="fsdp").module()
    attack.load_full(stage.full_state_dict())
    F.cross_entropy(attack(x), y).backward()
    own = x.detach().clone().requires_grad_()
    F.cross_entropy(trained.eval()(own), y).backward()
    torch.testing.assert_close(x.grad, own.grad)


def test_the_gradient_of_an_input_is_that_of_one_process(world: Processes) -> None:
    world.run(attacked, num=2)
