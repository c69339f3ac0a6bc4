"""A program in one line, how it is launched, and its explanation on one screen."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from partc.amounts import amount, counted, time_text
from partc.cost.cost_parts import part_text, peak_memory, waterfall
from partc.machines.topology import Topology
from partc.machines.topology_text import shipped
from partc.program import Program
from partc.reports.explanation import Explanation, columns
from partc.reports.report_data import verdict

BAR = 24  # characters of the longest bar of a waterfall


@dataclass(frozen=True)
class Summary:
    """The numbers that sum a program up; None for those that were not saved with it.

    ``lines``: of the programs of ranks, without their helpers. ``memory_bytes``: what a device has.
    ``exposed_share``: of the step, in which computing waits for transfers.
    """

    ranks: int
    programs: int
    lines: int
    step_s: float | None
    peak_bytes: int | None
    memory_bytes: int | None
    exposed_share: float | None

    @classmethod
    def of(cls, program: Program) -> Summary:
        names = {name for _, name in program.roles}
        cost: Mapping[str, Any] = program.cost.as_json() or {}
        step = cost.get("prediction") or {}
        waits = sum(each["exposed_s"] for each in step.get("axes", ()))
        known = program.basis.topology() if program.basis.machine else None
        return cls(
            ranks=program.mesh.num_ranks,
            programs=len(names),
            lines=sum(program.sources[name].count("\n") for name in names),
            step_s=step.get("seconds"),
            peak_bytes=peak_memory(cost)[0] or None,
            memory_bytes=known.memory_bytes if known else None,
            exposed_share=waits / step["seconds"] if step.get("seconds") else None,
        )

    def __str__(self) -> str:
        """``1024 ranks, 1 program (579 lines), 11.99 s, 24.40 of 80.00 GB, 18 % exposed``."""
        of = f" of {amount(self.memory_bytes, 'B')}" if self.memory_bytes else ""
        told = [
            counted(self.ranks, "rank"),
            f"{counted(self.programs, 'program')} ({counted(self.lines, 'line')})",
        ]
        if self.step_s is not None:
            told.append(f"{time_text(float(f'{self.step_s:.4g}'))} a step")
        if self.peak_bytes is not None:
            told.append(f"{amount(self.peak_bytes, 'B')}{of}")
        if self.exposed_share is not None:
            told.append(f"{self.exposed_share:.0%} exposed")
        return ", ".join(told)

    def as_json(self) -> dict[str, Any]:
        return dict(vars(self))


def launch_line(program: Program, folder: str) -> str:
    """The torchrun command that starts the ranks of a saved program, on each of its machines."""
    ranks = program.mesh.num_ranks
    run = shlex.quote(f"{folder.rstrip('/')}/run.py")
    each = ranks_per_machine(program)
    if each >= ranks:
        return f"torchrun --nproc-per-node {ranks} {run}"
    meet = "--rdzv-backend c10d --rdzv-endpoint HOST:29500"
    return f"torchrun --nnodes {ranks // each} --nproc-per-node {each} {meet} {run}"


def ranks_per_machine(program: Program) -> int:
    """How many ranks a machine has: the innermost level of links joins the devices of one.

    All ranks, where nothing says that there are several machines, or they would not be full.
    """
    ranks = program.mesh.num_ranks
    known = program.basis.topology() if program.basis.machine else None
    if known is None or len(known.levels) == 1:
        return ranks
    inside = known.unit_sizes[0]
    return inside if ranks % inside == 0 else ranks


def uncalibrated(topology: Topology | None) -> str:
    """A warning for figures that come with partc and were not measured here; else ""."""
    if topology is None or topology.name not in shipped():
        return ""
    return (
        f"predicted for {topology.name!r}, whose figures come with partc and were not measured "
        "here: `partc calibrate -o mesh.toml` measures a machine"
    )


def short_explanation(why: Explanation) -> str:
    """What fits on a screen: verdict, waterfall, choices, and who holds memory."""
    step = why.prediction
    lines: list[str] = []
    if step is not None:
        bounds = waterfall(step)
        found = why.estimated.as_json() if why.estimated else None
        lines += [
            verdict(bounds, step, found),
            "",
            f"the step, predicted {time_text(step.seconds)}",
        ]
        lines += [*columns([*_rows(bounds, step.seconds)], right=(2, 3)), ""]
    return "\n".join([*lines, *why.choices_text(), *why.holders_text()]).rstrip()


def _rows(bounds: list[dict[str, Any]], whole: float) -> Iterator[tuple[str, ...]]:
    """A row for each part of the step, with a bar that begins where the one before ends."""
    begin = 0.0
    for row in bounds:
        end = begin + row["seconds"] / (whole or 1.0)
        first, last = round(BAR * begin), max(round(BAR * end), round(BAR * begin) + 1)
        bar = " " * first + "=" * (last - first)
        seconds = time_text(float(f"{row['seconds']:.4g}"))
        yield part_text(row["part"]), bar, seconds, f"{row['seconds'] / (whole or 1.0):.1%}"
        begin = end
