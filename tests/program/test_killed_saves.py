"""SIGKILL at each thing that a save does to the disk: the old step or the new is whole."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import partc
from partc.errors import RunError
from partc.program.checkpoints import files
from partc.program.checkpoints.run_folder import committed
from partc.program.checkpoints.saved_checkpoint import Saved
from partc.verification.processes import Processes
from tests.patience import patience
from tests.program.trained import begin, train

pytestmark = pytest.mark.gloo
MOST = 200  # deeds of a save
AUDITED = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link"}


class Killer:
    """Ends this process just before the `last`-th thing that it does to files in a folder."""

    armed: Killer | None = None
    is_watching = False

    def __init__(self, folder: Path, last: int | None) -> None:
        self.folder, self.last, self.count = str(folder), last, 0
        Killer.armed = self

    def sees(self) -> None:
        self.count += 1
        if self.count == self.last:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Opened files, and names that are made, changed and deleted."""
        if event in AUDITED and arguments and self.is_of(arguments[0]):
            self.sees()

    def is_of(self, path: Any) -> bool:
        text = os.fspath(path) if isinstance(path, str | bytes | os.PathLike) else ""
        inside = str(text).startswith(self.folder)
        return inside or str(text).startswith(("rank-", "checkpoint", "step-"))  # from a handle


def watch(folder: Path, last: int | None) -> Killer:
    """Count also what Python does not tell of: each piece that is written, and made durable."""
    killer = Killer(folder, last)
    if not Killer.is_watching:
        Killer.is_watching = True
        sys.addaudithook(told)
        for module, name in ((files, "_write"), (os, "fsync")):
            setattr(module, name, behind(getattr(module, name)))
    return killer


def told(event: str, arguments: tuple[Any, ...]) -> None:
    if Killer.armed is not None:
        Killer.armed.audit(event, arguments)


def behind(act: Any) -> Any:
    def counted(*arguments: Any) -> Any:
        if Killer.armed is not None:
            Killer.armed.sees()
        return act(*arguments)

    return counted


def save(folder: Path, step: int, killed: int = -1, last: int | None = None) -> int:
    """One step; the rank `killed` ends before its `last`-th deed. How many deeds this rank did."""
    stage, optimizer = begin(int(os.environ["WORLD_SIZE"]), 1, seed=0)
    train(stage, optimizer, 1)
    checkpoints = partc.Checkpoints(folder, keep_latest_k=1)
    killer = watch(folder, last if int(os.environ["RANK"]) == killed else None)
    try:
        checkpoints.save(step, stage, optimizer)
        checkpoints.close()
    finally:
        Killer.armed = None
    return killer.count


def loads(folder: Path) -> int:
    stage, optimizer = begin(int(os.environ["WORLD_SIZE"]), 1, seed=1)
    return partc.Checkpoints(folder).load_latest(stage, optimizer)


def whole(folder: Path) -> int:
    """The number of the newest step, of which every file is what the list says."""
    saved = Saved.read(committed(folder)[-1])
    for name, entry in saved.files.items():
        assert files.sha256_of(saved.path / name) == entry.sha256
    for rank in range(saved.mesh.num_ranks):
        saved.prove(rank)
    return saved.step


def kill(num: int, folder: Path, points: Callable[[list[int]], list[tuple[int, int]]]) -> list[int]:
    """The newest step behind each of some ends of a save of step 2 beside step 1.

    ``points``: which rank ends before which of its deeds, given how many deeds each rank does. At
    the end the next save deletes what is left, and what it saves can be loaded.
    """
    old, run, found = folder / "old", folder / "run", []
    with Processes(num, timeout=patience(), quiet=True) as world:
        world.run(save, old, 1)
        shutil.copytree(old, run)
        deeds = world.run(save, run, 2)
        assert [path.name for path in run.iterdir()] == ["step-00000002"]
        for rank, last in points(deeds):
            shutil.rmtree(run)
            shutil.copytree(old, run)
            with pytest.raises((RunError, RuntimeError)):
                world.run(save, run, 2, rank, last)
            found.append(whole(run))
        world.run(save, run, 3)
        assert [path.name for path in run.iterdir()] == ["step-00000003"]
        assert world.run(loads, run) == [3] * num
    return found


def save_in_forks(folder: Path) -> list[int]:
    """The newest step behind each end of a save of step 2, which a fork of this rank makes."""
    old, run, found = folder / "old", folder / "run", []
    stage, optimizer = begin(1, 1, seed=0)
    train(stage, optimizer, 1)
    with partc.Checkpoints(old) as checkpoints:
        checkpoints.save(1, stage, optimizer)
    for last in range(1, MOST):
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(old, run)
        child = os.fork()
        if child == 0:
            watch(run, last)
            checkpoints = partc.Checkpoints(run, keep_latest_k=1)
            checkpoints.save(2, stage, optimizer)
            checkpoints.close()
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        found.append(whole(run))
        if code == 0:  # it has fewer deeds
            return found
        assert code == -signal.SIGKILL
    raise AssertionError("no save does so many things")


def test_the_old_step_or_the_new_one_is_whole(world: Processes, tmp_path: Path) -> None:
    [found] = world.run(save_in_forks, tmp_path, num=1)
    assert len(found) > 20
    assert found == sorted(found)  # the old one until the commit, the new one from then on
    assert {*found} == {1, 2}


def test_one_of_several_ranks_is_killed(tmp_path: Path) -> None:
    """In the middle of its save, and as the last thing that it does."""
    found = kill(
        2, tmp_path, lambda deeds: [(r, n) for r in (0, 1) for n in (deeds[r] // 2, deeds[r])]
    )
    assert found == [1, 2, 1, 1]
