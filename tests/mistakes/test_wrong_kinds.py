"""Things of another kind in the calls of optimizers and weights: each is refused in a sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import partc
from partc.errors import PartcError
from tests.mistakes.things import Net, batch_of, check, compiled, loss_of, one_rank, program

GROUPS = [{"params": [0, 1, 2, 3]}]
STATES = {  # of no optimizer
    "nothing": None,
    "a path": "optimizer.pt",
    "weights": {"up.weight": torch.ones(8, 4)},
    "a number of states": {"state": 3, "param_groups": GROUPS},
    "numbers as states": {"state": {0: 3}, "param_groups": GROUPS},
    "a number of groups": {"state": {}, "param_groups": 3},
    "numbers as groups": {"state": {}, "param_groups": [3]},
    "groups without parameters": {"state": {}, "param_groups": [{"lr": 1.0}]},
}
OPTIMIZERS: dict[str, Any] = {
    "nothing": None,
    "a name": "adam",
    "a class": torch.optim.AdamW,
    "a state": {},
}


def both() -> list[tuple[Any, torch.optim.Optimizer]]:
    """A stage, and a wrapped model before its first step, with their optimizers."""
    stage = compiled(mesh="dp=1").module()
    stage.load_full(Net())
    model = partc.parallelize(Net(), "dp=1", loss=loss_of, plan="ddp")
    return [(each, torch.optim.AdamW(each.parameters())) for each in (stage, model)]


def refused(words: str, call: Callable[..., Any], *given: Any, **named: Any) -> None:
    check((lambda: call(*given, **named), (words,)))


def test_calls_of_optimizers_take_an_optimizer_and_then_its_state() -> None:
    with one_rank():
        for model, optimizer in both():
            good = model.full_optim_state_dict(optimizer)
            load = model.load_full_optim_state_dict
            refused("the optimizer comes first, load_full_optim_state_dict(optimizer,", load, good)
            refused("the optimizer over stage.parameters()", load, state_dict=good)
            refused("The optimizer itself comes first, and a state dict", load, good, optimizer)
            load(optimizer, state_dict=good)
            for given in STATES.values():
                refused("the state is none of an optimizer", load, optimizer, given)
            for wrong in OPTIMIZERS.values():
                refused("groups of parameters", model.full_optim_state_dict, wrong)
                refused("groups of parameters", model.step_on_pieces, wrong)
                refused("groups of parameters", load, wrong, good)


def test_weights_are_tensors_by_name() -> None:
    with one_rank():
        stage, _ = both()[0]
        for given in (None, 3, [1], Net, {3: torch.ones(2)}):
            refused("stage.load_full(...)", stage.load_state_dict, given)


def test_a_flag_is_no_number_above_one(tmp_path: Any) -> None:
    with one_rank(), pytest.raises(PartcError, match=r"it is 2 .* Write True or False"):
        partc.Checkpoints(tmp_path, async_save=2)  # type: ignore[arg-type]
    with pytest.raises(PartcError, match=r"processes=.*: it is 2 .* Write True or False"):
        partc.verify(program(), Net(), batch_of(), loss_of, processes=2)  # type: ignore[arg-type]
