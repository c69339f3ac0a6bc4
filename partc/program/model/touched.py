"""A model that a saved program is loaded with, beside the one that it was compiled from."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from partc.errors import LoadError
from partc.trace.fingerprint import Fingerprint, table
from partc.trace.hooks_ahead import install_ahead
from partc.trace.touched_modules import changes, touched_modules


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
