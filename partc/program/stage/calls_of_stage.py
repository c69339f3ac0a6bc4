"""The tensors in what a stage is called with, and the form of the call."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from partc.errors import PartcError, RunError, TraceError
from partc.program import Program
from partc.program.step.arguments import tensors_given
from partc.program.wanted import WORDS
from partc.trace.record import Kind
from partc.trace.trees import TreeError

Found = tuple[Sequence[Tensor], str]  # the tensors, and the form


class Calls:
    """Finds the tensors in a call of a stage, whose first program is ``first``.

    Steps take the arguments of the loss that was compiled. A forward beside them takes those of the
    model: the form of a call is that of a forward program of the stage, or a new one where the
    model is at hand. ``programs`` are those that the stage has by now.
    """

    def __init__(self, first: Program, programs: Callable[[], Iterable[Program]]) -> None:
        self.first, self.programs = first, programs

    def tensors(self, kind: Kind, args: Sequence[Any], named: Mapping[str, Any]) -> Found:
        """The tensors in the arguments; the form is empty where it is that of the first program.

        RunError for arguments that are not as they were compiled.
        """
        if kind != "forward" or self.first.wanted.kind == "forward":
            return tensors_given(self.first.arguments, args, named, WORDS[kind]), ""
        forwards = [each for each in self.programs() if each.wanted.kind == "forward"]
        for each in forwards:
            try:
                return each.arguments.tensors(args, named), each.wanted.form
            except (TypeError, TreeError):
                continue
        recipe = self.first.recipe
        if recipe is None:
            raise _no_forward(self.first, forwards)
        try:
            given = recipe.given(args, named)
        except TraceError as error:
            raise self._for_step(args, named, error) from error
        return given.tensors, json.dumps(given.arguments.as_json())

    def _for_step(
        self, args: Sequence[Any], named: Mapping[str, Any], error: TraceError
    ) -> PartcError:
        """The error for arguments that the model does not take, and the loss perhaps does."""
        try:
            self.first.arguments.tensors(args, named)
        except (TypeError, TreeError):
            return error
        taken = ", ".join(self.first.arguments.names)
        return RunError(
            where="stage(...) in eval mode",
            what=f"it is given ({taken}), the arguments of the loss",
            why=f"in eval mode a stage is called as {self.first.model}: {error.what}, {error.why}",
            do=f"Call stage.eval_step({taken}) for the loss, or stage(...) as the model is called; "
            "in train mode stage(...) gives the loss.",
        )  # fmt: skip


def _no_forward(first: Program, forwards: Sequence[Program]) -> RunError:
    forms = "; ".join(f"({', '.join(each.arguments.names)})" for each in forwards)
    return RunError(
        where=f"stage(...) of {first.model}",
        what="the stage has no forward program for these arguments",
        why=f"it has forwards of {forms}" if forms else "it has no forward program",
        do='Compile it ahead by program.for_shapes(..., modes=("forward",)) before program.save, '
        "or give the loaded program its model: partc.with_model(program, model, loss).",
    )
