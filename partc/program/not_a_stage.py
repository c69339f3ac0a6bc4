"""What a script asks a program for that only a stage has: its parameters, a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from partc.errors import UsageError
from partc.wrong_calls import did_you_mean

_ELSEWHERE = {  # what is asked of a program, and which call of partc does it
    "verify": "partc.verify(program, model, inputs, loss=loss)",
    "check": "partc.verify(program, model, inputs, loss=loss).check()",
    "load": "partc.load(folder)",
    "compile": "partc.compile(model, mesh, inputs)",
    "with_model": "partc.with_model(program, model, loss)",
    "run": "stage = program.module(), and stage.step(*batch), under torchrun; a saved program runs "
    "by torchrun --nproc-per-node 2 FOLDER/run.py",
    "bench": "the command partc bench FOLDER, of a saved program",
    "simulate": "the command partc simulate FOLDER, of a saved program",
    "explain": "the command partc explain FOLDER, of a saved program",
    "save_checkpoint": "partc.save_checkpoint(folder, stage)",
    "load_checkpoint": "partc.load_checkpoint(folder, stage)",
}


class NoStageError(UsageError, AttributeError):
    """A program was used as the stage of a rank; ``hasattr`` says no."""


class NotAStage:
    """Tells of a call of a program that is meant for ``program.module()``."""

    def __call__(self, *inputs: Any, **named: Any) -> NoReturn:
        raise _no_stage("program(...)", "a program is not called", "stage(...)")

    if not TYPE_CHECKING:  # else every name would be one of its attributes

        def __getattr__(self, name: str) -> Any:
            from partc.program.stage.runtime import Stage

            if not name.startswith("_") and hasattr(Stage, name):
                raise _no_stage(f"program.{name}", f"a program has no {name}", f"stage.{name}")
            if name.startswith("_"):
                raise AttributeError(
                    f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self
                )
            if name == "generate":
                do = "stage(ids) in a loop, behind stage.eval()"
                raise _no_stage("program.generate", "a program is one step", do)
            if name in _ELSEWHERE:
                raise NoStageError(
                    where=f"program.{name}", what="a program has no such method",
                    why="something else of partc does that with a program",
                    do=f"Take {_ELSEWHERE[name]}.",
                )  # fmt: skip
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


def no_stage_yet(where: str) -> NoStageError:
    """A model of ``parallelize`` is asked for what only its stage has, before its first step."""
    return NoStageError(
        where=where, what="the model has taken no step yet",
        why="it is compiled for the batch of its first step, and this asks for what was compiled",
        do="Do it behind that step, or compile at once: model.compile_for(*batch).",
    )  # fmt: skip
