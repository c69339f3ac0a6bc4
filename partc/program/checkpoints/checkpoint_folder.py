"""The folder of a checkpoint: made under another name, and renamed when all ranks have written."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist

from partc.errors import RunError, UsageError
from partc.program.checkpoints.saved_checkpoint import MANIFEST, file_name


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


def first_rank_makes(partial: Path, target: Path) -> None:
    """Rank 0 makes the directory to write in; RunError if the step is there already."""
    if dist.get_rank() != 0:
        return
    if target.exists():
        raise RunError(
            where=str(target),
            what="this step was saved before",
            why="a checkpoint is never overwritten",
            do="Save under another step number, or move it away.",
        )
    partial.mkdir(parents=True, exist_ok=True)
    for left in partial.iterdir():  # of a save that was cut off
        left.unlink()


def first_rank_commits(partial: Path, target: Path, text: str) -> None:
    """Rank 0 writes the list and gives the folder its name; RunError if it lacks a file."""
    if dist.get_rank() != 0:
        return
    for rank in range(dist.get_world_size()):
        if not (partial / file_name(rank)).is_file():
            raise RunError(
                where=str(target.parent),
                what=f"rank 0 does not see the file that rank {rank} has written there",
                why="a checkpoint is one folder of all ranks",
                do="Name a folder on a file system that all hosts share.",
            )
    (partial / MANIFEST).write_text(text, encoding="utf-8")
    flush(partial / MANIFEST)
    partial.rename(target)
    flush(target.parent)


def flush(path: Path) -> None:
    """Make a file or directory durable before what depends on it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
