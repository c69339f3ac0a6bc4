"""Whole optimizer states: into an optimizer over the single-device model, and back."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partc
from partc.errors import LoadError, RunError
from partc.program import load
from partc.program.optimizer.optimizers import Stepping
from partc.program.stage.runtime import Stage
from partc.verification.processes import Processes
from tests.program.training import Residuals, batch_of, loss_of, train_alone, train_stage

pytestmark = pytest.mark.gloo
LAYOUTS = [  # with the optimizers of MAKERS that each tries
    ("dp=2,tp=2", "fsdp+megatron", ("AdamW", "AdamW on pieces", "Adafactor")),
    ("dp=4", "zero1", ("AdamW on pieces", "Adafactor")),
    ("pp=2,dp=2", "fsdp", ("AdamW", "SGD", "Adagrad")),
]
Optimizer = torch.optim.Optimizer


class WithSpare(Residuals):
    """Has a layer that no step reads, and a frozen one, in the midst of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(3, 5)
        self.last = nn.Linear(8, 8)
        self.last.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(super().forward(x))
        return y


def model_of(seed: int = 0) -> WithSpare:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return WithSpare()


def in_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups by name, as scripts make them."""
    decayed = [p for n, p in model.named_parameters() if n.endswith("weight")]
    others = [p for n, p in model.named_parameters() if not n.endswith("weight")]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def named(model: nn.Module) -> Any:
    return model.named_parameters()


MAKERS: dict[str, tuple[Callable[[nn.Module], Optimizer], str]] = {
    "AdamW": (lambda model: torch.optim.AdamW(in_groups(model), 1e-2), ""),
    "AdamW on pieces": (
        lambda model: torch.optim.AdamW(in_groups(model), 1e-2, fused=True), "step_on_pieces",
    ),
    "Adafactor": (lambda model: torch.optim.Adafactor(in_groups(model), 1e-2), "step_on_whole"),
    "SGD": (lambda model: torch.optim.SGD(named(model), 1e-2, 0.9), ""),
    "Adagrad": (lambda model: torch.optim.Adagrad(named(model), 1e-2), "step_on_pieces"),
}  # fmt: skip


def made(path: Path, kind: str, seed: int = 0) -> tuple[Stage, Optimizer]:
    stage = load(path).module()
    stage.load_full(model_of(seed))
    maker, route = MAKERS[kind]
    optimizer = maker(stage)
    if route:
        getattr(stage, route)(optimizer)
    return stage, optimizer


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def there_and_back(path: Path, kinds: tuple[str, ...]) -> None:
    for kind in kinds:
        maker, _ = MAKERS[kind]
        stage, optimizer = made(path, kind)
        train_stage(stage, optimizer, 2)
        alone = model_of()
        theirs = maker(alone)
        train_alone(alone, theirs, 2)
        state = through_a_file(stage.full_optim_state_dict(optimizer))
        close_states(state, theirs.state_dict())

        after = model_of(3)  # in one process, from what the ranks had
        after.load_state_dict(stage.full_state_dict())
        resumed = maker(after)
        resumed.load_state_dict(state)
        expected = train_alone(after, resumed, 2)
        assert train_stage(stage, optimizer, 2) == pytest.approx(expected, rel=1e-5)

        again, other = made(path, kind, 5)  # on ranks, from what one process had
        again.load_full(alone)
        again.load_full_optim_state_dict(other, through_a_file(theirs.state_dict()))
        assert other.param_groups[0]["lr"] == 1e-2
        assert train_stage(again, other, 2) == pytest.approx(expected, rel=1e-5)


def close_states(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert [g["params"] for g in found["param_groups"]] == [
        g["params"] for g in expected["param_groups"]
    ]
    for ours, theirs in zip(found["param_groups"], expected["param_groups"], strict=True):
        assert ours == theirs
    assert found["state"].keys() == expected["state"].keys()
    for number, fields in expected["state"].items():
        assert found["state"][number].keys() == fields.keys()
        for field, value in fields.items():
            ours = found["state"][number][field]
            assert ours.shape == value.shape
            torch.testing.assert_close(ours, value, rtol=2e-4, atol=2e-6, msg=f"{number} {field}")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mesh", "plan", "kinds"), LAYOUTS, ids=["fsdp+megatron", "zero1", "pp"])
def test_states_go_to_one_process_and_back(
    world: Processes, tmp_path: Path, mesh: str, plan: str, kinds: tuple[str, ...]
) -> None:
    world.run(there_and_back, saved(tmp_path, mesh, plan), kinds)


def saved(folder: Path, mesh: str, plan: str) -> Path:
    microbatches = 2 if "pp" in mesh else 1
    program = partc.compile(
        model_of(), mesh, batch_of(), loss=loss_of, plan=plan, microbatches=microbatches
    )
    program.save(folder / "program")
    return folder / "program"


class Remembers(torch.optim.SGD):
    """Keeps a list in its state."""

    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            self.state[p]["history"] = [1]
        return super().step(closure)


def refused(path: Path) -> None:
    stage, optimizer = made(path, "AdamW")
    train_stage(stage, optimizer, 1)
    state = stage.full_optim_state_dict(optimizer)
    with pytest.raises(LoadError, match=r"it has groups of \[\d+, \d+\] parameters"):
        stage.load_full_optim_state_dict(torch.optim.AdamW(stage.parameters()), state)
    group = state["param_groups"][0]
    group["params"] = group["params"][::-1]
    with pytest.raises(LoadError, match=r"has the shape .*, the parameter"):
        stage.load_full_optim_state_dict(MAKERS["AdamW"][0](stage), state)
    state["param_groups"][0]["params"] = group["params"][::-1]
    for each in state["param_groups"]:
        each["amsgrad"] = True
    with pytest.raises(LoadError, match=r"has no max_exp_avg_sq, which its hyperparameters ask"):
        stage.load_full_optim_state_dict(MAKERS["AdamW"][0](stage), state)
    sgd = MAKERS["SGD"][0](stage)
    train_stage(stage, sgd, 1)
    state = stage.full_optim_state_dict(sgd)
    state["param_groups"][0]["param_names"].reverse()
    with pytest.raises(LoadError, match=r"its groups name last\.bias where the optimizer has gain"):
        stage.load_full_optim_state_dict(MAKERS["SGD"][0](stage), state)
    one_group = stage.full_optim_state_dict(torch.optim.AdamW(stage.parameters()))
    with pytest.raises(LoadError, match="the states are of another than Adagrad"):
        stage.load_full_optim_state_dict(torch.optim.Adagrad(stage.parameters()), one_group)
    odd = Remembers(stage.parameters(), 0.1)
    train_stage(stage, odd, 1)
    with pytest.raises(RunError, match="'history': is a list"):
        stage.full_optim_state_dict(odd)
    with pytest.raises(RunError, match="none of the stage's"):
        stage.full_optim_state_dict(torch.optim.SGD(model_of().parameters(), 0.1))


def test_what_does_not_belong_is_refused(world: Processes, tmp_path: Path) -> None:
    world.run(refused, saved(tmp_path, "dp=2,tp=2", "fsdp+megatron"))


def test_a_parameter_that_was_added_is_named() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1)
    unused: Any = None  # the way in, which nothing takes
    Stepping(optimizer, [], unused)
    with pytest.raises(RunError, match=r"a parameter of shape \[2\] that is none of the stage's"):
        optimizer.step()
