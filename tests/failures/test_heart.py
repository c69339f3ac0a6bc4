"""Heartbeats of ranks: where each one's main thread is, and how long its steps take."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from partc.api import compile
from partc.heartbeats import FOLDER, Heartbeat, read
from partc.program.ranks.heart import Heart
from partc.verification.processes import Processes
from tests.patience import patience

pytestmark = pytest.mark.gloo


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = model(x).square().mean()
    return y


def seen_until(
    folder: Path, wanted: Callable[[dict[int, Heartbeat]], bool]
) -> dict[int, Heartbeat]:
    """The heartbeats, by rank, as soon as they are as wanted."""
    end = time.monotonic() + patience(60.0)
    while time.monotonic() < end:
        found = {beat.rank: beat for beat in read(folder).values()}
        if wanted(found):
            return found
        time.sleep(0.02)
    raise AssertionError(found)


def beats(folder: Path) -> tuple[dict[int, Heartbeat], dict[int, Heartbeat]]:
    """What rank 1 reads behind four steps, and while rank 0 waits for it in a fifth."""
    os.environ[FOLDER] = str(folder)
    x = torch.ones(4, 8)
    program = compile(nn.Linear(8, 4), "dp=2", (x,), loss=loss_of, plan="ddp")
    stage = program.module()
    program.module()  # a second stage of the process beats no second time
    assert sum(isinstance(each, Heart) for each in threading.enumerate()) == 1
    for _ in range(4):
        stage.step(x)
    dist.barrier()
    behind, inside = dict[int, Heartbeat](), dict[int, Heartbeat]()
    if dist.get_rank() == 1:
        behind = seen_until(folder, lambda found: found[1].call == "step 4")
        inside = seen_until(folder, lambda found: found[0].call == "step 5")
    stage.step(x)
    del os.environ[FOLDER]
    return behind, inside


def test_each_rank_says_where_it_is(world: Processes, tmp_path: Path) -> None:
    _, (behind, inside) = world.run(beats, tmp_path, num=2)
    mine = behind[1]
    assert (mine.rank, mine.inside, mine.moves) == (1, False, 8)
    assert mine.number > 0
    assert 0 < mine.step_s < patience(60.0)
    assert mine.place.startswith("behind step 4, ")
    assert ".py:" in mine.line  # a line of the script
    other = inside[0]
    assert (other.inside, other.moves) == (True, 9)
    assert other.moved_at > mine.moved_at
    assert other.place.startswith("in step 5")
    assert {path.name for path in tmp_path.iterdir()} >= {"rank-00000.json", "rank-00001.json"}


def without(folder: Path) -> int:
    x = torch.ones(4, 8)
    compile(nn.Linear(8, 4), "dp=2", (x,), loss=loss_of, plan="ddp").module().step(x)
    return sum(isinstance(each, Heart) for each in threading.enumerate())


def test_without_a_watchdog_nothing_beats(tmp_path: Path) -> None:
    with Processes(2, timeout=patience(), quiet=True) as world:
        assert world.run(without, tmp_path) == [0, 0]
