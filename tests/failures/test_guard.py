"""A step with NaN, infinity or a spike of the loss: named, and left out on all ranks alike."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import partc
from partc.api import compile
from partc.errors import RunError, UsageError
from partc.program.stage.runtime import Stage
from partc.verification.processes import Processes

pytestmark = pytest.mark.gloo
ROWS, WIDTH = 8, 6
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("dp=2", {"plan": "ddp"}),
    "fsdp": ("dp=2", {"plan": "fsdp"}),
    "tp": ("dp=1,tp=2", {"plan": "megatron"}),
    "pp": ("dp=1,pp=2", {"plan": "ddp", "microbatches": 2}),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.dropout(self.up(self.norm(x)), 0.2, self.training)
        y: Tensor = x + self.down(torch.tanh(h))
        return y


class Net(nn.Module):
    """The logarithm is NaN where a row has less than -4 in it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.logs = Logs()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.logs(x)
        return y


class Logs(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x.clamp(max=50.0).square() + 4 * x + 4.5)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = model(x)
    return y.mean()


def batch(step: int, bad: Sequence[int] = ()) -> Tensor:
    """Rows of a step; in a bad one the last row has what ``Net`` makes NaN of."""
    x = torch.rand(ROWS, WIDTH, generator=torch.Generator().manual_seed(step)) + 0.5
    if step in bad:
        x[-1] = float("inf")
    return x


def begin(name: str) -> tuple[Stage, torch.optim.Optimizer]:
    mesh, given = LAYOUTS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Net()
    stage = compile(model, mesh, (batch(0),), loss=loss_of, **given).module()
    stage.seed(7)
    return stage, torch.optim.SGD(stage.parameters(), lr=0.05, momentum=0.9)


def train(name: str, bad: Sequence[int], **rules: Any) -> tuple[dict[str, Tensor], list[str]]:
    """Five steps, and what the guard told."""
    stage, optimizer = begin(name)
    guard = partc.StepGuard(stage, **rules)
    for step in range(5):
        x = batch(step, bad)
        if guard.passes(step, stage.step(x), x):
            optimizer.step()
        else:
            assert all(p.grad is None for p in stage.parameters())
        optimizer.zero_grad()
    return stage.full_state_dict(), guard.told


def without(name: str, bad: Sequence[int]) -> dict[str, Tensor]:
    """The same without the bad steps, whose random numbers are drawn by nobody."""
    stage, optimizer = begin(name)
    for step in set(range(5)) - {*bad}:
        stage.seed(7, step)
        stage.step(batch(step))
        optimizer.step()
        optimizer.zero_grad()
    return stage.full_state_dict()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_bad_step_is_as_if_it_had_not_been(name: str, world: Processes) -> None:
    """Parameters, and the statistics of batch norms, under every layout."""
    found = world.run(train, name, [2], num=2)
    expected, _ = world.run(without, name, [2], num=2)
    for key, tensor in expected.items():
        if "num_batches_tracked" not in key:
            assert torch.equal(found[0][0][key], tensor), key
    for _, told in found:
        assert told == found[0][1]  # all ranks say the same
    [text] = found[0][1]
    assert text.startswith("step 2: the loss is nan; rank "), text


class Poor(nn.Module):
    """The second block divides by the sum of its input, which may be 0."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), Ratio()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x).mean() + self.second(x)
        return y


class Ratio(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return ((x - 1) / (x - 1).abs().sum(1, keepdim=True)).mean()


def named(ones: int) -> tuple[list[str], bool]:
    """What is told where a row is of ones, and whether a step with the rule "raise" raises."""
    x = batch(0)
    stage = compile(Poor(), "dp=2", (x,), loss=loss_of, plan="ddp").module()
    guard = partc.StepGuard(stage)
    assert guard.passes(0, stage.step(x), x)
    stage.zero_grad()
    x[ones] = 1.0
    assert not guard.passes(1, stage.step(x), x)
    assert not guard.passes(2, stage.step(x))
    with pytest.raises(RunError, match=r"step 3: .*mended|gradients are dropped"):
        partc.StepGuard(stage, nonfinite="raise").passes(3, stage.step(x), x)
    return guard.told, stage.seeded[1] == 4


@pytest.mark.parametrize("rank", [0, 1])
def test_the_module_the_rank_and_the_line_are_named(rank: int, world: Processes) -> None:
    for told, counted in world.run(named, 0 if rank == 0 else ROWS - 1, num=2):
        with_batch, alone = told
        assert f"step 1: the loss is nan; rank {rank}: the first NaN is made in second at" in (
            with_batch
        )
        assert "test_guard.py:" in with_batch
        assert "by div of f32[4,6] from" in with_batch
        assert (
            "step 2: the loss is nan; pass the batch, guard.passes(" in alone
        )  # its gradients are finite
        assert counted


def broken() -> list[str]:
    stage, _ = begin("fsdp")
    guard = partc.StepGuard(stage)
    with torch.no_grad():
        if dist.get_rank() == 1:
            stage.pieces()["blocks.1.up.weight"][1].fill_(float("inf"))
    stage.agreement.every = 0
    x = batch(0)
    assert not guard.passes(9, stage.step(x), x)
    return guard.told


def test_a_weight_that_is_not_finite_is_named(world: Processes) -> None:
    for told in world.run(broken, num=2):
        assert "rank 1: blocks.1.up.weight itself is not finite" in told[0]


# spikes --------------------------------------------------------------------------------------
def spikes(folder: Path) -> list[str]:
    """A spike is left out, goes back, or is what a rule of the script's says."""
    stage, optimizer = begin("fsdp")
    with partc.Checkpoints(folder, interval=5) as checkpoints:
        guard = partc.StepGuard(
            stage, spike=lambda loss, losses: loss > max(losses) + 0.5, on_spike="rollback",
            checkpoints=checkpoints, optimizer=optimizer,
        )  # fmt: skip
        kept: dict[str, Tensor] = {}
        for step in range(1, 14):
            x = batch(step) + 20.0 * (step == 13)
            passed = guard.passes(step, stage.step(x), x)
            assert passed == (step != 13)
            if passed:
                optimizer.step()
            optimizer.zero_grad()
            if checkpoints.save(step, stage, optimizer):
                kept = stage.full_state_dict()
        again = stage.full_state_dict()
        assert all(torch.equal(again[name], kept[name]) for name in kept)
        assert stage.seeded == (7, 10)
    factor = partc.StepGuard(stage, spike=1.5)
    for step, loss in enumerate([2.0] * 10 + [2.9, 3.2, 1.0, 2.0]):
        assert factor.passes(step, torch.tensor(loss)) == (loss != 3.2)
    below = partc.StepGuard(stage, spike=1.5)
    for step, loss in enumerate([-2.0] * 10 + [-1.1, -0.9]):
        assert below.passes(step, torch.tensor(loss)) == (loss != -0.9)
    return guard.told + factor.told


@pytest.mark.exhaustive
def test_spikes_follow_the_rule(world: Processes, tmp_path: Path) -> None:
    for told in world.run(spikes, tmp_path, num=2):
        assert told[0].startswith("step 13: the loss is ")
        assert told[1] == "step 11: the loss is 3.2, beside a median of 2"


def refuse(folder: Path) -> list[str]:
    stage, optimizer = begin("ddp")
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("partc").addHandler(handler)
    wrong: list[dict[str, Any]] = [
        {"nonfinite": "ignore"}, {"on_spike": "rollback"}, {"spike": 0.5}, {"spike": True},
        {"window": 3}, {"in_a_row": 0},
    ]  # fmt: skip
    for given in wrong:
        with pytest.raises(UsageError, match="StepGuard"):
            partc.StepGuard(stage, **given)
    with pytest.raises(UsageError, match="a loss is one number"):
        partc.StepGuard(stage).passes(0, torch.ones(2))
    guard = partc.StepGuard(stage, in_a_row=3)
    nan = torch.tensor(float("nan"))
    assert not guard.passes(0, nan)
    assert not guard.passes(1, nan)
    with pytest.raises(RunError, match="bad step number 3 in a row"):
        guard.passes(2, nan)
    empty = partc.Checkpoints(folder)
    back = partc.StepGuard(
        stage, nonfinite="rollback", checkpoints=empty, optimizer=optimizer
    )  # fmt: skip
    with pytest.raises(RunError, match="no saved step to go back to"):
        back.passes(0, nan)
    return heard


@pytest.mark.exhaustive
def test_wrong_rules_and_too_many_bad_steps_are_refused(world: Processes, tmp_path: Path) -> None:
    first, second = world.run(refuse, tmp_path, num=2)
    assert sum("The optimizer does not take it" in text for text in first) == 2
    assert second == []
