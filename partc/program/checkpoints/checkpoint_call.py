"""The arguments of ``save_checkpoint`` and ``load_checkpoint``, before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from partc.errors import UsageError
from partc.program.not_a_stage import no_stage_yet
from partc.program.stage.runtime import Stage
from partc.wrong_calls import as_path, did_you_mean, quoted

FIRST = {  # what a call has before the stage
    "save_checkpoint": "folder, ", "load_checkpoint": "folder, ", "Checkpoints.save": "step, "
}  # fmt: skip


def stage_of(call: str, given: Any) -> Any:
    """The stage of a model that ``parallelize`` gave, or what was given."""
    if not hasattr(type(given), "compile_for"):
        return given
    if given._stage is None:
        raise no_stage_yet(call)
    return given._stage


def check_arguments(call: str, stage: object, optimizer: object, loader: object = None) -> None:
    """UsageError for what is no stage, no optimizer, or no loader with a position."""
    if not isinstance(stage, Stage):
        raise UsageError(
            where=call, what=f"the stage is {quoted(stage)}",
            why="a checkpoint is made of the pieces that this rank has",
            do=f"Pass what program.module() gave: {call}({FIRST.get(call, '')}stage, "
            "optimizer).",
        )  # fmt: skip
    no_groups = isinstance(optimizer, type) or not hasattr(optimizer, "param_groups")
    if optimizer is not None and no_groups:
        raise UsageError(
            where=call, what=f"the optimizer is {quoted(optimizer)}",
            why="it has no groups of parameters",
            do='Pass the optimizer itself, and a scheduler as states={"scheduler": scheduler}.',
        )  # fmt: skip
    if loader is not None and not hasattr(loader, "set_epoch"):
        raise UsageError(
            where=f"{call}(loader=...)", what=f"it is {quoted(loader)}",
            why="it has no position in the data that could be saved",
            do="Pass what stage.loader(dataset) or program.sampler(dataset) gave.",
        )  # fmt: skip


def folder_of_run(call: str, given: Any) -> Path:
    """The folder of a run; UsageError for a file, which a save would stumble over."""
    if (path := as_path(given, call)).is_file():
        raise UsageError(
            where=f"{call}({quoted(str(given))})", what="it is a file",
            why="each checkpoint is a folder in that of the run",
            do='Name a folder, which is made if it is not there: "checkpoints".',
        )  # fmt: skip
    return path


class NoAttributeError(UsageError, AttributeError):
    """The checkpoints of a run were asked for what they have not; ``hasattr`` says no."""


def no_attribute(of: object, name: str) -> AttributeError:
    """What to ask for in the place of an attribute that the checkpoints of a run have not."""
    if name.startswith("_"):
        return AttributeError(f"{type(of).__name__!r} object has no attribute {name!r}")
    own = [each for each in dir(of) if not each.startswith("_")]
    do = did_you_mean(name, own)
    if name in ("load", "restore", "resume"):
        do = "Call load_latest(stage, optimizer): it returns the step to go on from, or 0."
    if name == "save_checkpoint":
        do = "Call save(step, stage, optimizer)."
    return NoAttributeError(
        where=f"Checkpoints.{name}", what="there is no such method",
        why=f"it has {', '.join(own)}", do=do or "See help(partc.Checkpoints).",
    )  # fmt: skip
