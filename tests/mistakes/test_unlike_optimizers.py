"""Optimizers that differ by rank: every rank names who differs, also where weights are pieces."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

import partc
from partc.errors import RunError
from partc.verification.processes import Processes
from tests.mistakes.things import Net, loss_of

pytestmark = pytest.mark.gloo


def trained(plan: str, how: str, mesh: str = "dp=2") -> str:
    """What two or more steps end with, where rank 1 makes its optimizer in another way."""
    rank = dist.get_rank()
    other = how if rank == 1 else ""
    model = partc.parallelize(Net(), mesh, loss=loss_of, plan=plan, batch="global")
    rate = 0.2 if other == "rate" else 0.1
    made: Any = torch.optim.SGD(
        model.parameters(), rate, momentum=0.9, nesterov=other == "nesterov"
    )
    numbers = torch.Generator().manual_seed(0)
    try:
        for step in range(9):  # before ranks compare all that they have
            if other == "late" and step == 4:
                made.param_groups[0]["lr"] = 0.3
            x, y = torch.randn(2, 8, 4, generator=numbers)
            made.zero_grad()
            model.step(x, y)
            if other != "never":
                made.step()
    except RunError as error:
        return str(error)
    return "alike"


@pytest.mark.rows(4)
@pytest.mark.parametrize("how", ["rate", "nesterov", "never", "late", ""])
@pytest.mark.parametrize("plan", ["ddp", "fsdp"])
def test_who_differs_is_named(world: Processes, plan: str, how: str) -> None:
    for said in world.run(trained, plan, how, num=2):
        if not how:
            assert said == "alike"
            continue
        whats = {"nesterov": "hyperparameter, or class,", "never": "number of steps"}
        what = whats.get(how, "learning rate")
        assert f"step: rank 1: another {what} of the optimizer than rank 0 (" in said
        assert "Make the optimizer alike on all ranks" in said


def test_ranks_of_other_stages_have_other_groups(world: Processes) -> None:
    assert world.run(trained, "ddp", "rate", "pp=2", num=2) == ["alike", "alike"]


def with_a_new_layer() -> list[str]:
    raw, x = Net(), torch.ones(8, 4)
    stage: Any = partc.compile(raw, "dp=2", (x, x), loss=loss_of, plan="fsdp").module()
    optimizer = torch.optim.SGD(stage.parameters(), 0.1)
    raw.added = torch.nn.Linear(4, 3)
    told = []
    for step in range(3):
        if step == 1:
            optimizer.add_param_group({"params": raw.added.parameters()})
        stage.step(x, x)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        told += [f"{step}: {each.message}" for each in caught]
    return told


def test_a_layer_that_the_model_got_since_is_told(world: Processes) -> None:
    for [said] in world.run(with_a_new_layer, num=2):
        assert said.startswith("1: partc: SGD.step() finds no gradient of parameter 0 of its group")
        assert "group 1, of shape [3, 4]" in said
        assert "compile the model with it" in said
