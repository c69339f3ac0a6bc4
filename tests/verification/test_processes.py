"""Processes: several jobs in one world, worlds of other sizes, errors and hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from partc.errors import RunError
from partc.verification.processes import Processes
from tests.patience import patience

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.gloo


@pytest.fixture(scope="module")
def world() -> Iterator[Processes]:
    with Processes(3, timeout=patience()) as processes:
        yield processes


def sum_of_ranks(start: int) -> float:
    total = torch.tensor(float(start + dist.get_rank()))
    dist.all_reduce(total)
    return total.item()


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise RunError(where="here", what="a failure", why="asked for", do="Nothing.")
    dist.barrier()


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(3600)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_one_world_does_several_jobs_of_several_sizes(world: Processes) -> None:
    assert world.run(sum_of_ranks, 10) == [33.0] * 3
    assert world.run(sum_of_ranks, 10, num=2) == [21.0] * 2
    assert world.run(sum_of_ranks, 0) == [3.0] * 3


def test_a_failing_rank_is_named_and_the_world_goes_on(world: Processes) -> None:
    with pytest.raises(RunError, match="a failure") as caught:
        world.run(fail_on, 1)
    assert "on rank 1" in caught.value.__notes__[0]
    assert world.run(sum_of_ranks, 0) == [3.0] * 3


def test_a_hanging_rank_is_named_and_ended() -> None:
    with Processes(2, timeout=patience()) as world:
        pids = set(world.run(os.getpid))
        world.timeout = patience(3)
        with pytest.raises(RunError, match=r"ranks \[1\]: did not answer"):
            world.run(hang_on, 1)
        assert not [pid for pid in pids if is_running(pid)]
        world.timeout = patience()
        assert world.run(sum_of_ranks, 0) == [1.0] * 2


def killed(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_killed_rank_is_named_and_replaced(world: Processes) -> None:
    with pytest.raises(RunError, match=r"rank 1: its process ended .exit code -9") as caught:
        world.run(killed, 1)
    assert "on rank 1" in caught.value.__notes__[0]
    assert world.run(sum_of_ranks, 0) == [3.0] * 3


def speaks() -> None:
    print(f"here is {dist.get_rank()}")


def test_output_is_tagged_by_rank(world: Processes, capfd: pytest.CaptureFixture[str]) -> None:
    world.run(speaks)
    world.close()
    assert sorted(capfd.readouterr().err.splitlines()) == [
        f"[rank {rank}] here is {rank}" for rank in range(3)
    ]


KILLED = """
import os, signal
from partc.verification.processes import Processes

world = Processes(2)
world._start()  # the server imports torch now, and has forked no rank that could run
os.kill(os.getpid(), signal.{name})
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_who_is_killed_while_ranks_start_leaves_nothing(name: str, tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", KILLED.format(name=name)],
        cwd=ROOT, env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE, timeout=patience(60),  # ranks that are left hold the pipe
    )  # fmt: skip
    assert ended.returncode == -getattr(signal, name)
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith("pymp")] == []
