"""Processes: several jobs in one world, worlds of other sizes, errors and hangs."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from partc.errors import RunError
from partc.verification.processes import Processes
from tests.patience import patience

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
        assert not pids & {process.pid for process in multiprocessing.active_children()}
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
