"""A model that a saved program is given, beside the one that it was compiled from."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from torch import nn

from partc.errors import LoadError
from partc.program.wanted import Wanted, warn_of_mode
from partc.trace.fingerprint import Fingerprint, table
from partc.trace.forward_code import changed_code, forward_code
from partc.trace.hooks_ahead import install_ahead
from partc.trace.touched_modules import changes, touched_modules
from partc.users_line import warn

MOST = 3  # modules that a warning names


def check_touched(folder: Path, plan: Path, fingerprint: Fingerprint, model: nn.Module) -> None:
    """LoadError if modules have other hooks, or forwards of their own, than when compiled."""
    install_ahead(model)
    lines = changes(fingerprint.touched, touched_modules(model))
    if lines:
        raise LoadError(
            where=str(folder),
            what=f"modules of {type(model).__name__} have other hooks or forwards than when it "
            "was compiled",
            why="the program has what they did then, and calls none of them",
            do=f'Make them as they were, or compile again, with plan="{plan}":{table(lines)}',
        )


class Compiled(Protocol):
    """What is known of a program: how its model was when it was compiled."""

    @property
    def wanted(self) -> Wanted: ...
    @property
    def fingerprint(self) -> Fingerprint: ...


def warn_of_model(compiled: Compiled, model: nn.Module) -> None:
    """Warn where a model is in another mode than when it was compiled, or computes in another way:
    its tensors are the same, and the program computes what the model did then.
    """
    warn_of_mode(compiled.wanted, model)
    lines = changed_code(compiled.fingerprint.code, forward_code(model))
    if lines:
        warn(
            f"partc: {type(model).__name__} has changed since the program was compiled, and the "
            "program computes what it did then. Compile again, unless the change is of no account: "
            + "; ".join(lines[:MOST])
            + (f"; {len(lines) - MOST} more" if len(lines) > MOST else "")
        )
