"""Programs of one stage are of one model: those of another have weights that nobody would read."""

from __future__ import annotations

from typing import Any

from partc.errors import RunError
from partc.program import Program
from partc.trace.fingerprint import table


def check_same_model(first: Program, program: Program) -> None:
    """RunError if a program that a stage is to share was compiled from another model.

    Where both were compiled in this process the models themselves tell, else names and shapes.
    """
    differences = first.fingerprint.differences(program.fingerprint)
    if differences:
        why = f"{len(differences)} of its tensors differ"
        raise _another(first, why, f"{table(differences)}")
    if (model := _model_of(first)) is not None and _model_of(program) not in (None, model):
        raise _another(first, "it has weights of its own, which the stage would not read", "")


def _model_of(program: Program) -> Any:
    """A reference to the model of a program that was compiled in this process."""
    return getattr(program.recipe, "held", None)


def _another(first: Program, why: str, lines: str) -> RunError:
    return RunError(
        where="stage.share",
        what=f"the program was compiled for another model than the stage's {first.model}",
        why=why,
        do="Compile it by program.also(inputs, loss=loss) of the stage's own program; two models "
        "that share weights are one step of a module that holds both." + lines,
    )
