"""Checkpoints saved beside the steps of a run: whole, of one step, and as many as are wanted."""

from __future__ import annotations

import os
import resource
import shutil
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import partc
from partc.errors import LoadError, RunError, UsageError
from partc.program.checkpoints.run_folder import Retention, committed
from partc.program.checkpoints.staging import Staging
from partc.program.stage.runtime import Stage
from partc.program.tensorfile import TensorFile
from partc.verification.processes import Processes
from tests.example_program import example_model
from tests.program.trained import begin, train

pytestmark = pytest.mark.gloo
BESIDE_S = 0.3  # how long a slow copy takes


def slowly(staging: Staging, finish: Callable[[Staging], None] = Staging.finish) -> None:
    time.sleep(BESIDE_S)
    finish(staging)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def whole_states(stage: Stage, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The whole model and the whole moments, by name."""
    found = stage.full_state_dict()
    moments = stage.full_optim_state_dict(optimizer)["state"]
    for number, state in moments.items():
        found |= {f"{number}.{field}": value.clone() for field, value in state.items()}
    return found


def check_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key


# a whole life --------------------------------------------------------------------------------
def run(folder: Path) -> tuple[dict[str, Tensor], float]:
    """Eight steps, saved at every second one; the state at step 6, and the last loss."""
    stage, optimizer = begin(2, 2, seed=0)
    state, loss = {}, 0.0
    with partc.Checkpoints(folder, interval=2, keep_latest_k=2) as checkpoints:
        assert checkpoints.load_latest(stage, optimizer) == 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Staging, "finish", slowly)
            for step in range(1, 7):
                train(stage, optimizer, 1)  # its optimizer steps while the save before is copied
                assert checkpoints.save(step, stage, optimizer) == (step % 2 == 0)
            state = whole_states(stage, optimizer)
            loss = train(stage, optimizer, 2)
    return state, loss


def go_on(folder: Path, dp: int, tp: int) -> tuple[dict[str, Tensor], float]:
    stage, optimizer = begin(dp, tp, seed=1)
    with partc.Checkpoints(folder) as checkpoints:
        assert checkpoints.load_latest(stage, optimizer) == 6
    return whole_states(stage, optimizer), train(stage, optimizer, 2)


@pytest.mark.exhaustive
def test_what_is_saved_is_the_step_at_which_save_was_called(
    world: Processes, tmp_path: Path
) -> None:
    """Though the next step of the optimizer comes while it is copied."""
    folder = tmp_path / "run"
    state, loss = world.run(run, folder)[0]
    assert names(folder) == ["step-00000004", "step-00000006"]
    for dp, tp in ((2, 2), (1, 3), (1, 1)):
        found, again = world.run(go_on, folder, dp, tp, num=dp * tp)[0]
        check_equal(found, state)
        assert again == pytest.approx(loss, rel=1e-5)


# errors --------------------------------------------------------------------------------------
def fail(folder: Path) -> None:
    """Whatever fails in the thread is raised by the next call on all ranks, and the old stays."""
    stage, optimizer = begin(1, 2, seed=0)
    train(stage, optimizer, 1)
    checkpoints = partc.Checkpoints(folder)
    checkpoints.save(1, stage, optimizer)
    checkpoints.wait()
    for step, break_it, why in ((2, write_slowly, "was written to|rank 0 cannot go on"),
                                (3, full_disk, "cannot be read or written|rank 1 cannot go on"),
                                (4, no_room, "bytes left|rank 0 cannot go on")):  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            behind = break_it(patch, stage)
            checkpoints.save(step, stage, optimizer)
            behind()
            with pytest.raises(RunError, match=why):
                checkpoints.save(step, stage, optimizer)
        dist.barrier()
        assert names(folder) == ["step-00000001"]
        dist.barrier()
    checkpoints.save(5, stage, optimizer)
    checkpoints.close()
    assert names(folder) == ["step-00000001", "step-00000005"]
    with pytest.raises(UsageError, match="were closed"):
        checkpoints.save(6, stage, optimizer)


def write_slowly(patch: Any, stage: Stage) -> Callable[[], None]:
    """The script writes to a parameter of rank 0 while it is copied."""
    patch.setattr(Staging, "finish", slowly)

    def behind() -> None:
        if dist.get_rank() == 0:
            with torch.no_grad():
                stage.pieces()["down.weight"][1].add_(0.0)

    return behind


def full_disk(patch: Any, stage: Stage) -> Callable[[], None]:
    """The disk of rank 1 takes no more than 100 bytes of a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    running = partc.Checkpoints.wait

    def wait(checkpoints: partc.Checkpoints) -> None:
        try:
            running(checkpoints)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return lambda: patch.setattr(partc.Checkpoints, "wait", wait)


def no_room(patch: Any, stage: Stage) -> Callable[[], None]:
    patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
    return lambda: None


def test_an_error_beside_the_steps_is_raised_by_the_next_call(
    world: Processes, tmp_path: Path
) -> None:
    world.run(fail, tmp_path / "run", num=2)


def refuse(folder: Path) -> None:
    stage, optimizer = begin(1, 2, seed=0)
    first = dist.get_rank() == 0
    with partc.Checkpoints(folder, async_save=False) as checkpoints:
        with pytest.raises(RunError, match="not the same step"):
            checkpoints.save(4 + first, stage, optimizer)
        checkpoints.save(7, stage, optimizer)
        with pytest.raises(RunError, match="saved before"):
            checkpoints.save(7, stage, optimizer)
        dist.barrier()
        if first:
            file = folder / "step-00000007/rank-00000.safetensors"
            file.write_bytes(file.read_bytes()[:-1])
        dist.barrier()
        with pytest.raises(LoadError, match=r"rank-00000\.safetensors|rank 0 cannot go on"):
            checkpoints.load_latest(stage, optimizer)
    for wrong in ({"interval": 0}, {"keep_latest_k": 0}, {"keep_time": 3}, {"async_save": "no"}):
        with pytest.raises(UsageError):
            partc.Checkpoints(folder, **wrong)


def test_wrong_calls_and_damage_are_refused(world: Processes, tmp_path: Path) -> None:
    world.run(refuse, tmp_path / "run", num=2)


# what stays ----------------------------------------------------------------------------------
def test_steps_stay_by_count_and_by_age(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        (tmp_path / f"step-{step:08d}").mkdir()
        (tmp_path / f"step-{step:08d}/checkpoint.json").touch()
        os.utime(tmp_path / f"step-{step:08d}/checkpoint.json", (0, 100.0 * step))
    steps = committed(tmp_path)

    def removed(count: int | None, age_s: float | None) -> list[int]:
        age = None if age_s is None else timedelta(seconds=age_s)
        return [steps.index(path) + 1 for path in Retention(count, age).removed(steps, 450.0)]

    assert removed(None, None) == []
    assert removed(3, None) == [1]
    assert removed(None, 200.0) == [1, 2]
    assert removed(3, 200.0) == [1, 2]
    assert removed(1, 0.0) == removed(None, 0.0) == [1, 2, 3]  # never the newest


def clean(folder: Path) -> None:
    stage, _ = begin(1, 2, seed=0)
    with partc.Checkpoints(folder, keep_time=timedelta(0)) as checkpoints:
        checkpoints.save(6, stage)
    assert partc.load_checkpoint(folder, stage) == 6


def test_what_killed_runs_have_left_goes_and_nothing_else(world: Processes, tmp_path: Path) -> None:
    left = [".step-00000003.partial", ".step-00000001.removed"]
    for name in [*left, "step-00000004", ".step-mine", "notes"]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-00000.safetensors").touch()
    world.run(clean, tmp_path, num=2)
    assert names(tmp_path) == [".step-mine", "notes", "step-00000004", "step-00000006"]


# frozen parameters ---------------------------------------------------------------------------
FROZEN = "rank-00000.frozen.safetensors"


def freeze(folder: Path) -> None:
    stage, optimizer = begin(1, 2, seed=0)
    with partc.Checkpoints(folder, keep_latest_k=2) as checkpoints:
        for step in (1, 2, 3):
            train(stage, optimizer, 1)
            checkpoints.save(step, stage, optimizer)
        checkpoints.wait_for_staging()
        with torch.no_grad():
            stage.pieces()["shift"][1].add_(1.0)
        checkpoints.save(4, stage, optimizer)
    shift = stage.full_state_dict()["shift"]
    stage.load_full(example_model(1))
    partc.load_checkpoint(folder, stage, optimizer)
    assert torch.equal(stage.full_state_dict()["shift"], shift)


def test_parameters_that_did_not_change_are_links(world: Processes, tmp_path: Path) -> None:
    """To the files of a step that may be gone; one that was written to is a file of its own."""
    world.run(freeze, tmp_path, num=2)
    three, four = (tmp_path / f"step-0000000{step}" / FROZEN for step in (3, 4))
    assert three.stat().st_nlink == 1  # steps 1 and 2 had the same file, and are gone
    assert list(TensorFile(three)) == ["model/shift"]
    assert not four.samefile(three)


def link(folder: Path) -> None:
    stage, optimizer = begin(1, 2, seed=0)
    for step in (1, 2):
        train(stage, optimizer, 1)
        partc.save_checkpoint(folder, stage, optimizer, step=step)


def test_a_synchronous_save_links_too(world: Processes, tmp_path: Path) -> None:
    world.run(link, tmp_path, num=2)
    one, two = (tmp_path / f"step-0000000{step}" for step in (1, 2))
    assert (one / FROZEN).samefile(two / FROZEN)
    assert not (one / "rank-00000.safetensors").samefile(two / "rank-00000.safetensors")
