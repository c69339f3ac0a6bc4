"""``partc.picture``: a program's step, memory, mesh or schedule as an SVG picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from partc.atomic import atomic_write
from partc.drawing import image
from partc.errors import UsageError
from partc.file_endings import check_ending
from partc.pictures.memory_svg import memory_svg
from partc.pictures.mesh_svg import mesh_svg
from partc.pictures.pipeline_svg import pipeline_svg
from partc.program import Program
from partc.reports.drawn_program import check_program
from partc.reports.saved_step import saved_step
from partc.reports.step_svg import step_svg
from partc.wrong_calls import as_path, did_you_mean, frozen, known_arguments, quoted


@frozen
@dataclass(frozen=True)
class Picture:
    """An SVG picture: ``svg`` is its text, ``save`` writes it, a notebook shows it."""

    svg: str
    words: str  # what it shows, for who does not see it

    def save(self, path: str | Path) -> None:
        """Write the picture into a file, which is replaced if it exists.

        Args:
            path: the file, as ``"step.svg"``.

        Raises:
            UsageError: its name has another ending, or it cannot be written.
        """
        check_ending(file := as_path(path, "save"), "svg", f"save({quoted(str(path))})")
        atomic_write(file, self.svg)

    def _repr_html_(self) -> str:
        return image(self.svg, self.words)


def _timeline(program: Program, where: str) -> str:
    return pipeline_svg(program) if program.schedule else step_svg(program, where)


def _mesh(program: Program, where: str) -> str:
    return mesh_svg(program)


def _grid(program: Program, where: str) -> str:
    if not program.schedule:
        raise UsageError(
            where=where, what="there is no grid of this program",
            why="its mesh has no pipeline ranks, and a grid shows a pipeline's schedule",
            do="Draw its time line: of='timeline', or --of timeline on the command line.",
        )  # fmt: skip
    return saved_step(program).svg()


OF: dict[str, Callable[[Program, str], str]] = {
    "timeline": _timeline,
    "memory": memory_svg,
    "mesh": _mesh,
    "grid": _grid,
}


@known_arguments
def picture(program: Program, of: str = "timeline", where: str = "program") -> Picture:
    """Draw something of a program, as it is predicted.

    Args:
        program: from ``compile`` or ``load``.
        of: ``"timeline"`` (what ranks compute and send in a step), ``"memory"`` (bytes over the
            step, and who holds them), ``"mesh"`` (ranks on machines) or ``"grid"`` (the schedule of
            a pipeline).
        where: how errors call the program.

    Returns:
        A Picture: ``save("step.svg")`` writes it, ``svg`` is its text.

    Raises:
        UsageError: there is no picture of this name, or nothing of the step was saved.

    Example::

        partc.picture(partc.load("build"), of="memory").save("memory.svg")
    """
    check_program(program, "picture")
    if of not in OF:
        raise UsageError(
            where=f"picture(of={quoted(of)})", what="there is no such picture",
            why=f"there are {', '.join(OF)}",
            do=did_you_mean(of, OF) or "Take one of these.",
        )  # fmt: skip
    if not program.basis.tapes and of != "mesh":
        raise UsageError(
            where=where, what="nothing of this program's step was saved",
            why="it was not made by partc.compile", do="Compile the model again.",
        )  # fmt: skip
    return Picture(OF[of](program, where), f"{of} of {program.model} on {program.mesh}")
