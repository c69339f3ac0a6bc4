"""How a program is shown: a method of ``Program``."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import partc
from partc.amounts import counted
from partc.cost.cost_html import cost_html
from partc.drawing import html_table
from partc.errors import PartcError
from partc.wrong_calls import known_arguments

if TYPE_CHECKING:
    from partc.program import Program

MOST_BYTES = 35_000  # of a picture in a notebook


@known_arguments
def picture(self: Program, of: str = "timeline") -> partc.Picture:
    """A picture of the program: ``program.picture(of="memory").save("memory.svg")``.

    ``of``: ``"timeline"``, ``"memory"``, ``"mesh"``, or of a pipeline ``"grid"``. UsageError where
    nothing of the program's step was saved with it.
    """
    return partc.picture(self, of)


def program_html(program: Program) -> str:
    """What a program is, for a notebook: its plan in a line, its step as a picture, its costs.

    A step of many bars is left out, so that the piece stays below 50 kB.
    """
    lines = {name: program.sources[name].count("\n") for _, name in program.roles}
    files = [f"{name}: {counted(num, 'line')}" for name, num in lines.items()]
    head = html_table([files], f"{program.model} on {program.mesh or 'one device'}")
    drawn = ""
    with suppress(PartcError):  # a program that cannot be drawn is shown without a picture
        drawn = partc.picture(program)._repr_html_()
    return f"{head}{drawn if len(drawn) < MOST_BYTES else ''}{cost_html(program.cost.as_json())}"


@known_arguments
def report(self: Program) -> partc.ReportPage:
    """The program's predicted step as a page: ``program.report().save("report.html")``.

    UsageError where nothing of the program's step was saved with it.
    """
    return partc.report(self)
