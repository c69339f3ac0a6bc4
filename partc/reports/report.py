"""``partc.report``: a program's predicted step as one HTML page, for a browser or a notebook."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from partc.atomic import atomic_write
from partc.file_endings import check_ending
from partc.program import Program
from partc.reports.drawn_program import check_program
from partc.reports.report_data import Json, report_data
from partc.reports.report_page import framed, report_page
from partc.wrong_calls import as_path, frozen, known_arguments, quoted


@frozen
@dataclass(frozen=True)
class ReportPage:
    """A program's predicted step: ``told`` has all numbers, ``html`` is the page that shows them.

    In a notebook the page stands in the cell's output.
    """

    told: Json

    @property
    def html(self) -> str:
        """The text of the page, which fetches nothing."""
        return report_page(self.told)

    def save(self, path: str | Path) -> None:
        """Write the page into a file.

        Args:
            path: the file, as ``"report.html"``, which is replaced if it exists.

        Raises:
            UsageError: its name has another ending, or it cannot be written.
        """
        check_ending(file := as_path(path, "save"), "html", f"save({quoted(str(path))})")
        atomic_write(file, self.html)

    def __str__(self) -> str:
        return str(self.told["verdict"])

    def _repr_html_(self) -> str:
        return framed(self.html)


@known_arguments
def report(program: Program) -> ReportPage:
    """The predicted step of a program beside its text: time line, memory, waits, alternatives.

    Args:
        program: from ``compile`` or ``load``.

    Returns:
        A ReportPage: ``save("report.html")`` writes it, ``told`` has its numbers.

    Raises:
        UsageError: nothing of the program's step was saved with it.

    Example::

        partc.report(partc.load("build")).save("report.html")
    """
    check_program(program, "report")
    return ReportPage(report_data(program))


Report = ReportPage  # its first name
