"""How a program is shown: a method of ``Program``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import partc

if TYPE_CHECKING:
    from partc.program import Program


def picture(program: Program, of: str = "timeline") -> partc.Picture:
    """A picture of the program: ``program.picture(of="memory").save("memory.svg")``.

    ``of``: ``"timeline"``, ``"memory"``, ``"mesh"``, or of a pipeline ``"grid"``. UsageError where
    nothing of the program's step was saved with it.
    """
    return partc.picture(program, of)


def report(program: Program) -> partc.ReportPage:
    """The program's predicted step as a page: ``program.report().save("report.html")``.

    UsageError where nothing of the program's step was saved with it.
    """
    return partc.report(program)
