"""The arguments of ``save_checkpoint`` and ``load_checkpoint``, before anything is written."""

from __future__ import annotations

from partc.errors import UsageError
from partc.program.runtime import Stage
from partc.wrong_calls import quoted


def check_arguments(call: str, stage: object, optimizer: object) -> None:
    """UsageError for what is no stage, or no optimizer."""
    if not isinstance(stage, Stage):
        raise UsageError(
            where=call, what=f"the stage is {quoted(stage)}",
            why="a checkpoint is made of the pieces that this rank has",
            do=f"Pass what program.module() gave: {call}(folder, stage, optimizer).",
        )  # fmt: skip
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise UsageError(
            where=call, what=f"the optimizer is {quoted(optimizer)}",
            why="it has no groups of parameters",
            do="Pass the optimizer itself; save the state_dict() of a scheduler beside it.",
        )  # fmt: skip
