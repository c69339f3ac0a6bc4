"""What a rank forks (a loader's workers) does not end the rank's process groups: on real ranks."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import partc
from partc.program.ranks.forks import leave_garbage_to_ranks
from partc.verification.processes import Processes
from tests.data.readers import program_of
from tests.patience import patience

pytestmark = [
    pytest.mark.gloo,
    pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning"),
]


class Collecting(Dataset[Any]):
    """Rows of a dataset that makes much garbage: the collector runs in the worker."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, row: int) -> torch.Tensor:
        gc.collect()
        return torch.tensor(row)


def make_garbage(path: Path) -> None:
    """A stage that is gone with its process group, and waits for the collector."""
    gc.disable()
    stage: Any = partc.load(path).module()
    circle: list[Any] = [stage, stage.groups]
    circle.append(circle)


def read() -> list[int]:
    """The rows of a worker that a script's own loader forks in a later process group."""
    leave_garbage_to_ranks()  # which a stage does when it is made, as the last job has
    loader: Any = DataLoader(Collecting(), num_workers=1, timeout=patience(60))
    try:
        return [int(row) for row in loader]
    finally:
        gc.enable()


def test_workers_leave_the_groups_of_a_stage_that_is_gone(world: Processes, tmp_path: Path) -> None:
    program_of("dp=2,tp=2", "fsdp+megatron").save(tmp_path / "program")
    world.run(make_garbage, tmp_path / "program")
    assert world.run(read) == [[0, 1, 2, 3]] * 4


def forked() -> int:
    """What a child finds: 1 for a collector that runs, 2 for one that leaves alone what was."""
    child = os.fork()
    if not child:
        os._exit(gc.isenabled() + 2 * (gc.get_freeze_count() > 0))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_the_collector_is_as_it_was_on_both_sides_of_a_fork() -> None:
    leave_garbage_to_ranks()
    assert (forked(), gc.isenabled()) == (3, True)
    gc.disable()
    try:
        assert (forked(), gc.isenabled()) == (2, False)
    finally:
        gc.enable()
