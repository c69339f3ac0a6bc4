"""Islands that compute unequal numbers of microbatches train as one device does on all of them."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from partc.api import compile
from partc.errors import RunError, UsageError
from partc.plan.uneven import shares
from partc.program import Program, load
from partc.program.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from partc.program.stage.runtime import Stage
from partc.verification.processes import Processes
from partc.verification.verification import verify
from tests.program.island_runs import Deep, Draws, loss, made

pytestmark = pytest.mark.gloo

ROWS, STEPS = 8, 4  # of a microbatch
LAYOUTS = [
    ("island=2,dp=2", "ddp"),
    ("island=2,dp=2", "fsdp"),
    ("island=2,tp=2", "megatron"),
    ("island=4", "ddp"),
    ("island=2,pp=2", "ddp;microbatches = 2"),
    ("island=2,dp=2", "zero1;microbatches = 2"),
    ("island=2,dp=2", 'fsdp;batch = "local"'),
]
COUNTS = {"2": (3, 1), "4": (1, 3, 2, 1)}


def plan(mesh: str, preset: str) -> str:
    head, _, more = preset.partition(";")
    numbers = [*COUNTS[mesh.removeprefix("island=")[0]]]
    return f'preset = "{head}"\n{more}\n[uneven]\nmicrobatches = {numbers}\n'


@cache
def compiled(mesh: str, preset: str, kind: Any = Deep) -> Program:
    local = 'batch = "local"' in preset
    inputs = tuple(x[: ROWS // 2] if local else x for x in microbatch(0, 0))
    return compile(made(kind), mesh, inputs, loss=loss, plan=plan(mesh, preset))


def microbatch(step: int, number: int) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(100 * step + number)
    x = torch.randn(ROWS, 12, dtype=torch.float64, generator=numbers)
    return x, x[:, :4].sin()


def own_rows(stage: Stage, step: int) -> list[Tensor]:
    """What this rank is given of a step: its pieces of its island's microbatches."""
    program = stage._program
    counts, island = COUNTS[str(program.mesh.islands)], stage.coords["island"]
    first = sum(counts[:island])
    every = [microbatch(step, n) for n in range(first, first + counts[island])]
    if 'batch = "local"' in program.plan:
        half = slice(stage.coords["dp"] * ROWS // 2, (stage.coords["dp"] + 1) * ROWS // 2)
        every = [(x[half], y[half]) for x, y in every]
    return [torch.cat(xs) for xs in zip(*every, strict=True)]


def begin(mesh: str, preset: str, kind: Any = Deep) -> tuple[Stage, torch.optim.Optimizer]:
    stage = compiled(mesh, preset, kind).module()
    stage.load_full(made(kind))
    return stage, torch.optim.AdamW(stage.parameters(), lr=1e-2)


class Reference:
    """One device that accumulates the gradients of all microbatches."""

    def __init__(self, num: int) -> None:
        self.num, self.model = num, made(Deep)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def backward(self, step: int) -> float:
        whole = 0.0
        for number in range(self.num):
            value = loss(self.model, *microbatch(step, number)) / self.num
            value.backward()
            whole += value.item()
        return whole

    def step(self, step: int, clip: float = 0.0) -> float:
        whole = self.backward(step)
        if clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return whole


def same_weights(stage: Stage, model: nn.Module) -> None:
    whole = stage.full_state_dict()
    for name, param in model.named_parameters():
        torch.testing.assert_close(whole[name], param.detach(), atol=1e-12, rtol=0)


def trains_as_one_device(mesh: str, preset: str) -> None:
    stage, optimizer = begin(mesh, preset)
    reference = Reference(sum(COUNTS[str(stage._program.mesh.islands)]))
    for step in range(STEPS):
        clip = 0.1 * (step == 2)
        wanted = reference.step(step, clip)
        found = stage.step(*own_rows(stage, step)).item()
        assert abs(found - wanted) < 1e-13, (step, found, wanted)
        if clip:
            stage.clip_grad_norm_(clip)
        optimizer.step()
        optimizer.zero_grad()
    same_weights(stage, reference.model)


@pytest.mark.rows(2)
@pytest.mark.parametrize(("mesh", "preset"), LAYOUTS)
def test_training_is_that_of_one_device(world: Processes, mesh: str, preset: str) -> None:
    world.run(trains_as_one_device, mesh, preset)


@pytest.mark.rows(1)
@pytest.mark.parametrize(("mesh", "preset"), LAYOUTS)
def test_the_step_is_verified(mesh: str, preset: str) -> None:
    program = compiled(mesh, preset)
    report = verify(program, made(Deep), microbatch(0, 0), loss=loss).check()
    assert {"gradient of all islands", "loss of all islands"} <= {*report.kinds()}


def habits() -> None:
    """Accumulation over calls, scales, GradScaler, and the call of the stage with a backward."""
    stage, optimizer = begin("island=2,dp=2", "ddp")
    reference = Reference(4)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(STEPS):
        reference.backward(2 * step)
        reference.step(2 * step + 1)
        stage.step(*own_rows(stage, 2 * step), scale=1024.0)
        scaler.scale(stage(*own_rows(stage, 2 * step + 1))).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    same_weights(stage, reference.model)


@pytest.mark.exhaustive
def test_gradients_add_up_and_are_scaled(world: Processes) -> None:
    world.run(habits)


def resumes(folder: Path) -> None:
    stage, optimizer = begin("island=2,dp=2", "fsdp")
    reference = Reference(4)
    for step in range(2):
        reference.step(step)
        stage.step(*own_rows(stage, step))
        optimizer.step()
        optimizer.zero_grad()
    save_checkpoint(folder, stage, optimizer, step=2)
    for mesh, preset in (("island=2,dp=2", "fsdp"), ("island=2,tp=2", "megatron")):
        again = begin(mesh, preset)
        load_checkpoint(folder, *again)
        other = copy.deepcopy(reference)
        other.step(2)
        again[0].step(*own_rows(again[0], 2))
        again[1].step()
        same_weights(again[0], other.model)


@pytest.mark.exhaustive
def test_training_resumes(world: Processes, tmp_path: Path) -> None:
    world.run(resumes, tmp_path)


# rows ---------------------------------------------------------------------------------------------
def reads(preset: str) -> list[int]:
    """The rows that this rank reads in an epoch, in order; the loss is that of one device."""
    stage, optimizer = begin("island=2,dp=2", preset)
    x = torch.cat([microbatch(9, number)[0] for number in range(9)])
    rows = TensorDataset(x, x[:, :4].sin(), torch.arange(len(x)))
    reference = Reference(1)
    taken: list[int] = []
    for own, labels, numbers in stage.loader(rows, shuffle=True, seed=3):
        found = stage.step(own, labels)
        taken += numbers.tolist()
        every: list[list[int]] = [[]] * 4
        dist.all_gather_object(every, numbers.tolist())
        whole = sorted({row for each in every for row in each})
        assert len(whole) == 4 * ROWS
        wanted = loss(reference.model, x[whole], x[whole, :4].sin())
        assert abs(found.item() - wanted.item()) < 1e-13
        optimizer.zero_grad()
    return taken


@pytest.mark.exhaustive
@pytest.mark.parametrize("preset", ["ddp", 'fsdp;batch = "local"'])
def test_loaders_read_the_rows_of_each_island(world: Processes, preset: str) -> None:
    [fast, *_, slow] = world.run(reads, preset)
    assert len(fast) == 3 * len(slow) == 2 * (3 * ROWS) // (2 if "local" in preset else 1)
    assert not {*fast} & {*slow}


def wrong_rows() -> list[str]:
    stage, _ = begin("island=2,dp=2", "ddp")
    said = []
    x, y = own_rows(stage, 0)
    for given in ((x[:-1], y[:-1]), microbatch(0, 0), (x.float(), y)):
        with pytest.raises(RunError) as error:
            stage.step(*given)
        said.append(str(error.value))
    with pytest.raises(UsageError) as usage:
        stage.loader(TensorDataset(*microbatch(0, 0)), last="partial")
    return [*said, str(usage.value)]


def test_other_numbers_of_rows_are_refused(world: Processes) -> None:
    fast, *_, slow = world.run(wrong_rows)
    assert "23 rows for 3 microbatches" in fast[0]
    assert "rank" in slow[0] or "rows" in slow[0]
    assert "equally many rows" in fast[1] or "rank" in fast[1]
    assert 'last="drop"' in fast[3]


def evaluates() -> None:
    """A forward takes any batch, and other lengths of microbatches are programs of their own."""
    stage, _ = begin("island=2,dp=2", "ddp")
    x, y = microbatch(5, 0)
    assert stage.eval()(x).shape == (ROWS, 4)
    stage.train()
    num = COUNTS["2"][stage.coords["island"]]
    given = [torch.cat([each[:4]] * num) for each in (x, y)]
    wanted = loss(made(Deep), x[:4], y[:4])
    assert abs(stage.step(*given).item() - wanted.item()) < 1e-13


@pytest.mark.exhaustive
def test_a_stage_evaluates_and_takes_other_lengths(world: Processes) -> None:
    world.run(evaluates)


def draws() -> list[float]:
    """Losses of equal rows: microbatches, steps and islands draw numbers of their own."""
    stage, _ = begin("island=4", "ddp", Draws)
    found = []
    for _ in range(2):
        x = torch.cat([microbatch(0, 0)[0]] * COUNTS["4"][stage.coords["island"]])
        found.append(stage.step(x, x[:, :4].sin()).item())
        found.append(stage.parameters().__next__().grad.sum().item())  # type: ignore[union-attr]
    return found


def test_microbatches_draw_numbers_of_their_own(world: Processes) -> None:
    every = world.run(draws)
    assert all(each == every[0] for each in every)
    first, _, second, _ = every[0]
    assert first != second


# chosen -------------------------------------------------------------------------------------------
def test_shares_follow_speeds() -> None:
    assert shares([1, 1], 8) == [4, 4]
    assert shares([1, 0.5], 16) == [11, 5]
    assert shares([1, 1, 1, 0.5], 28) == [8, 8, 8, 4]
    assert shares([100, 1], 4) == [3, 1]  # no island without work
    for speeds in ([3, 2, 1], [1.7, 0.3, 0.9, 0.2]):
        found = shares(speeds, 12)
        longest = max(num / speed for num, speed in zip(found, speeds, strict=True))
        assert longest == min(
            max(num / speed for num, speed in zip(each, speeds, strict=True))
            for each in ways(12, len(speeds))
        )


def ways(num: int, parts: int) -> list[list[int]]:
    if parts == 1:
        return [[num]]
    firsts = range(1, num - parts + 2)
    return [[first, *rest] for first in firsts for rest in ways(num - first, parts - 1)]


@pytest.mark.parametrize(
    ("speeds", "num"), [([], 4), ([1, 0], 4), ([1, 1], 1), ([1, float("nan")], 4), ([1, 1], 2.5)]
)
def test_what_is_no_speed_is_refused(speeds: list[float], num: Any) -> None:
    with pytest.raises(UsageError):
        shares(speeds, num)


def test_a_program_saves_and_loads(tmp_path: Path) -> None:
    program = compiled("island=2,dp=2", "ddp")
    program.save(tmp_path / "build")
    again = load(tmp_path / "build")
    assert again.sources == program.sources
    assert again.plan == program.plan
    assert "* num, dim)" in (tmp_path / "build" / "run.py").read_text()
