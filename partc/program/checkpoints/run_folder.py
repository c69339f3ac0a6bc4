"""The folder of a run: a directory for each step, which appears whole, and goes whole.

``step-00000100/`` is made as ``.step-00000100.partial`` and renamed when all ranks have written:
that rename is the commit. One that is too old is renamed to ``.step-00000100.removed`` before it is
deleted. What a killed run has left under such a name counts for nothing, and goes at the next save.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from partc.errors import RunError, UsageError
from partc.program.checkpoints.files import file_name, flush
from partc.program.folders import CHECKPOINT
from partc.wrong_calls import check_whole_number, quoted

STEP = re.compile(r"step-(\d{8,})\Z", re.ASCII)
LEFT = re.compile(r"\.step-\d{8,}\.(partial|removed)\Z", re.ASCII)
SPARE = 1.1  # of the predicted bytes have to be free: directories and lists take some more


@dataclass(frozen=True)
class Retention:
    """Which steps of a folder stay: so many of the newest, those up to an age, or all.

    The newest stays in any case.
    """

    keep_latest_k: int | None = None
    keep_time: timedelta | None = None

    def check(self) -> None:
        """UsageError for counts and times that keep nothing, or are none."""
        if self.keep_latest_k == 0:
            raise UsageError(
                where="Checkpoints(keep_latest_k=...)", what="it is 0, which would keep no step",
                why="it counts the newest steps that stay",
                do="Leave it out, or pass None, to keep all; or pass how many are kept.",
            )  # fmt: skip
        if self.keep_latest_k is not None:
            check_whole_number(self.keep_latest_k, "Checkpoints(keep_latest_k=...)", 1)
        if self.keep_time is not None and not isinstance(self.keep_time, timedelta):
            raise UsageError(
                where="Checkpoints(keep_time=...)", what=f"it is {quoted(self.keep_time)}",
                why="it says how long a step is kept",
                do="Pass a datetime.timedelta, as timedelta(days=3), or leave it out.",
            )  # fmt: skip

    def removed(self, steps: Sequence[Path], now: float) -> list[Path]:
        """Those of the steps, oldest first, that go."""
        return [path for place, path in enumerate(steps) if self._goes(steps, place, now)]

    def _goes(self, steps: Sequence[Path], place: int, now: float) -> bool:
        newer = len(steps) - 1 - place
        if newer == 0:
            return False
        too_many = self.keep_latest_k is not None and newer >= self.keep_latest_k
        made = (steps[place] / CHECKPOINT).stat().st_mtime
        return too_many or (
            self.keep_time is not None and now - made > self.keep_time.total_seconds()
        )


KEEP_ALL = Retention()


def step_number(path: Path) -> int:
    """The number in the name of a step's directory."""
    return int(path.name.removeprefix("step-"))


def committed(folder: Path) -> list[Path]:
    """The directories of the whole steps of a folder, oldest first."""
    steps = [each for each in folder.glob("step-*") if STEP.match(each.name)]
    return sorted((each for each in steps if (each / CHECKPOINT).is_file()), key=step_number)


def number_of_step(folder: Path, step: int) -> int:
    """The number that names a checkpoint; UsageError for what is no number, RunError for 0 where
    others are: that is what a call without a number says, and it would count as the oldest.
    """
    if type(step) is not int or step < 0:
        raise UsageError(
            where=f"save_checkpoint(step={step!r})", what="is not the number of a step",
            why="the number names the checkpoint, and load_checkpoint takes the largest",
            do="Pass a whole number from 0 on.",
        )  # fmt: skip
    known = [] if step else sorted(each.name for each in folder.glob("step-*"))
    if known:
        raise RunError(
            where="save_checkpoint", what="no step= is given, or step=0",
            why=f"that is the first of a folder, and {folder} has {known[-1]} already: "
            "load_checkpoint takes the largest number, and none is overwritten",
            do="Number it: save_checkpoint(folder, stage, optimizer, step=100).",
        )  # fmt: skip
    return step


def step_folder(folder: Path, step: int) -> Path:
    """Where a step is to be saved; RunError if it is there already."""
    target = folder / f"step-{number_of_step(folder, step):08d}"
    if target.exists():
        raise RunError(
            where=str(target), what="this step was saved before",
            why="a checkpoint is never overwritten",
            do="Save under another step number, or move it away.",
        )  # fmt: skip
    return target


def partial_of(target: Path) -> Path:
    """The name of a step's directory before its commit."""
    return target.with_name(f".{target.name}.partial")


# what rank 0 does for all --------------------------------------------------------------------
def first_rank_makes(target: Path, num_bytes: int) -> None:
    """Delete what killed runs have left, and make the directory to write in.

    RunError if the step is there already, or its bytes do not fit on the disk.
    """
    if dist.get_rank() != 0:
        return
    step_folder(target.parent, step_number(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in [each for each in target.parent.iterdir() if LEFT.match(each.name)]:
        shutil.rmtree(left)
    _check_room(target.parent, num_bytes)
    partial_of(target).mkdir()


def first_rank_drops(target: Path) -> None:
    """Delete what was written of a step that cannot be saved: a full disk has room again."""
    if dist.get_rank() == 0:
        shutil.rmtree(partial_of(target), ignore_errors=True)


def first_rank_commits(target: Path, text: str) -> None:
    """Write the list and give the directory its name; RunError if it lacks a rank's file."""
    if dist.get_rank() != 0:
        return
    partial = partial_of(target)
    for rank in range(dist.get_world_size()):
        if not (partial / file_name(rank)).is_file():
            raise RunError(
                where=str(target.parent),
                what=f"rank 0 does not see the file that rank {rank} has written there",
                why="a checkpoint is one folder of all ranks",
                do="Name a folder on a file system that all hosts share.",
            )
    (partial / CHECKPOINT).write_text(text, encoding="utf-8")
    flush(partial / CHECKPOINT)
    flush(partial)  # the names of its files, before its own name says that they are there
    partial.rename(target)
    flush(target.parent)


def first_rank_retires(folder: Path, retention: Retention) -> None:
    """Delete the steps that a folder is not to keep, each whole or not at all."""
    if dist.get_rank() != 0:
        return
    for path in retention.removed(committed(folder), time.time()):
        gone = path.with_name(f".{path.name}.removed")
        path.rename(gone)
        shutil.rmtree(gone)


def _check_room(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < num_bytes * SPARE:
        raise RunError(
            where=str(folder), what=f"its disk has {free:,} bytes left",
            why=f"a checkpoint of this run takes {num_bytes:,}, and a little more for its list",
            do="Make room, keep fewer steps (keep_latest_k), or name a folder on another disk. "
            "What was saved before is as it was.",
        )  # fmt: skip
