"""What a script asks a program for that only a stage has: its parameters, a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from partc.errors import UsageError
from partc.wrong_calls import did_you_mean


class NoStageError(UsageError, AttributeError):
    """A program was used as the stage of a rank; ``hasattr`` says no."""


class NotAStage:
    """Tells of a call of a program that is meant for ``program.module()``."""

    def __call__(self, *inputs: Any, **named: Any) -> NoReturn:
        raise _no_stage("program(...)", "a program is not called", "stage(...)")

    if not TYPE_CHECKING:  # else every name would be one of its attributes

        def __getattr__(self, name: str) -> Any:
            from partc.program.runtime import Stage

            if not name.startswith("_") and hasattr(Stage, name):
                raise _no_stage(f"program.{name}", f"a program has no {name}", f"stage.{name}")
            if name.startswith("_"):
                raise AttributeError(
                    f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self
                )
            own = [each for each in dir(self) if not each.startswith("_")]
            raise NoStageError(
                where=f"program.{name}", what="a program has no such attribute",
                why=f"it has {', '.join(own)}",
                do=did_you_mean(name, own) or "See help(partc.Program).",
            )  # fmt: skip


def _no_stage(where: str, what: str, do: str) -> NoStageError:
    return NoStageError(
        where=where, what=what, why="it is the text of all ranks, without weights",
        do=f"Make this rank's part of it, stage = program.module(), and take {do}.",
    )  # fmt: skip
