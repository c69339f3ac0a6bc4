"""What ``Program.module`` is told of batches that differ from the compiled one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from partc.errors import UsageError

Partial = Literal["replicate", "drop", "pad"]
Pad = Mapping[str, float]
MOST_PROGRAMS = 32  # of one stage, unless module(most_programs=...) says another number


@dataclass(frozen=True)
class Choices:
    """What a stage does with batches that differ from the compiled one.

    ``partial``: what happens with a batch whose rows data ranks cannot share. ``pad``: by the name
    of an input the number that fills it up. ``most_programs``: how many programs a stage may have.
    """

    partial: Partial | None = None
    pad: Pad = field(default_factory=dict)
    most_programs: int = MOST_PROGRAMS


NO_CHOICES = Choices()


def check_partial(partial: str | None) -> None:
    """UsageError for a word that says nothing about partial batches."""
    if partial is not None and partial not in get_args(Partial):
        raise UsageError(
            where=f"partial={partial!r}",
            what="there is no such way to treat a partial batch",
            why=f"there are {', '.join(get_args(Partial))}",
            do="Take one of these, or leave it out.",
        )
