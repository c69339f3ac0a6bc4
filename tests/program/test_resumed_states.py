"""Schedulers and global generators of a run go on from a checkpoint as if it had not ended."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import lr_scheduler

import partc
from partc.errors import LoadError, RunError, UsageError
from partc.program.checkpoints.plain_states import plain, value_of
from partc.verification.processes import Processes
from tests.example_program import example_batch
from tests.program.trained import begin, rewrite

pytestmark = pytest.mark.gloo
Optimizer = torch.optim.Optimizer

SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
    "steps": lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 4], 0.5),
    "cycle": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=12),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=10.0),
    "after each other": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.CosineAnnealingLR(o, 8)], [2]
    ),
}


def steps_of(
    folder: Path, name: str, tp: int, seed: int, until: int, pieces: bool
) -> dict[str, Tensor]:
    """Train until a step, from the newest one of a folder on; the weights of the whole model.

    Each step's batch has noise of the global generators, other of each rank's.
    """
    for each in (torch.manual_seed, random.seed, np.random.seed):
        each(seed + dist.get_rank())
    stage, optimizer = begin(1, tp, seed)
    scheduler = SCHEDULERS[name](optimizer)
    states = {"scheduler": scheduler}
    if pieces:
        optimizer = stage.step_on_pieces(optimizer)
    with partc.Checkpoints(folder, interval=3) as checkpoints:
        start = checkpoints.load_latest(stage, optimizer, states=states)
        for step in range(start + 1, until + 1):
            noise = torch.rand(()) + random.gauss(0.0, 1.0) + np.random.standard_normal()
            dist.broadcast(noise := noise.float(), 0)
            x, *others = example_batch()
            loss = stage.step(x * (1 + 0.1 * noise).to(x.dtype), *others)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step(*([loss.item()] if name == "plateau" else []))
            checkpoints.save(step, stage, optimizer, states=states)
    return stage.full_state_dict()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_run_that_goes_on_equals_one_that_did_not_end(
    name: str, world: Processes, tmp_path: Path
) -> None:
    """To the last bit: learning rates, and what a script draws beside the steps."""
    pieces = name != "lambda"
    whole = world.run(steps_of, tmp_path / "whole", name, 2, 1, 7, pieces, num=2)
    world.run(steps_of, tmp_path / "cut", name, 2, 1, 5, pieces, num=2)
    again = world.run(steps_of, tmp_path / "cut", name, 2, 9, 7, pieces, num=2)
    for expected, found in zip(whole, again, strict=True):
        assert expected.keys() == found.keys()
        for key, tensor in expected.items():
            assert torch.equal(found[key], tensor), key


def on_another_mesh(folder: Path) -> float:
    """The generators of other ranks are left alone."""
    stage, optimizer = begin(1, 1, 0)
    torch.manual_seed(5)
    scheduler = SCHEDULERS["cycle"](optimizer)
    assert partc.Checkpoints(folder).load_latest(stage, optimizer, states={"scheduler": scheduler})
    assert scheduler.last_epoch == 3
    return torch.rand(()).item()


def test_on_another_mesh_the_scheduler_goes_on_alone(world: Processes, tmp_path: Path) -> None:
    world.run(steps_of, tmp_path, "cycle", 2, 1, 3, False, num=2)
    torch.manual_seed(5)
    assert world.run(on_another_mesh, tmp_path, num=1) == [torch.rand(()).item()]


# refused -------------------------------------------------------------------------------------
class Odd:
    """Keeps what it is given, if it has the right sign."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["value"] == 13:
            raise ValueError("13 is no value")
        self.value = state["value"]


def refuse(folder: Path) -> list[str]:
    stage, optimizer = begin(1, 2, 0)
    checkpoints, told = partc.Checkpoints(folder, async_save=False), list[str]()

    def save(step: int, states: Any) -> None:
        checkpoints.save(step, stage, optimizer, states=states)

    with pytest.raises(RunError, match=r"states\['net'\]\['value'\].*is a Tensor.*x\.tolist\(\)"):
        save(1, {"net": Odd(torch.ones(3))})
    with pytest.raises(RunError, match=r"\[1\]: is a builtin_function|rank 1 cannot go on"):
        save(1, {"net": Odd([1, print if dist.get_rank() else 2])})
    with pytest.raises(RunError, match="have not the same state of it"):
        save(1, {"it": Odd(dist.get_rank())})
    for wrong in ([1], {"it": 3}, {"it": Odd}, {4: Odd(1)}):
        with pytest.raises(UsageError, match="states="):
            save(1, wrong)
    save(1, {"one": Odd({2: (1, float("inf"))}), "two": Odd(13)})
    first, second = Odd(0), Odd(1)
    with pytest.raises(LoadError, match=r"Odd 'two' does not take its state.*13 is no value"):
        checkpoints.load_latest(stage, optimizer, states={"one": first, "two": second})
    assert (first.value, second.value) == (0, 1)  # none has been changed
    for name, words in (
        ("three", r"It has 'one', 'two': pass states={'one': \.\.\.}"),
        ("two.", "Did you mean 'two'.* Pass it under the name that was saved"),
    ):
        with pytest.raises(LoadError, match=f"saved without a state of '{name}'.*{words}"):
            checkpoints.load_latest(stage, optimizer, states={name: first})
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("partc").addHandler(handler)
    assert partc.load_checkpoint(folder, stage, optimizer, states={"one": first}) == 1
    assert first.value == {2: (1, float("inf"))}
    if dist.get_rank() == 0:
        rewrite(folder / "step-00000001", lambda f: f["states"].update(one={"eval": ["1"]}))
    dist.barrier()
    with pytest.raises(LoadError, match=r"'eval' is no kind of value|rank 0 cannot go on"):
        partc.load_checkpoint(folder, stage, optimizer, states={"one": first})
    return told


def test_what_is_no_plain_state_is_refused_by_name(world: Processes, tmp_path: Path) -> None:
    first, second = world.run(refuse, tmp_path, num=2)
    assert any("the state of two, which nobody takes" in text for text in first)
    assert not any("nobody takes" in text for text in second)


def test_plain_values_come_back_as_they_were() -> None:
    value = {
        "a": [1, 2.5, None, True, "x", float("inf")], 3: (1, (2,)), (1, 2): {}, "np": np.float64(2),
        "lr": torch.tensor(0.1),
    }  # fmt: skip
    again = value_of(json.loads(json.dumps(plain(value, "it"))))
    assert again == value
    assert isinstance(again[3][1], tuple)
    deep: list[Any] = []
    for _ in range(60):
        deep = [deep]
    with pytest.raises(RunError, match="lists deep"):
        plain(deep, "it")


@pytest.mark.parametrize(
    ("value", "do"),
    [
        (torch.ones(3), "x.tolist(), of which load_state_dict makes it again"),
        (np.ones(3), "Give x.tolist()"),
        (Path("run"), "Give str(x)"),
        ({1, 2}, "Give sorted(x)"),
        (object(), "Give numbers and texts"),
    ],
)
def test_what_is_no_plain_value_is_told_what_stands_in_its_place(value: Any, do: str) -> None:
    with pytest.raises(RunError) as caught:
        plain({"ema": value}, "states['it']")
    assert caught.value.where == "states['it']['ema']"
    assert do in caught.value.do
