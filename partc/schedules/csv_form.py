"""A schedule as CSV, in the compute-only form of torch's pipelining: one row per rank.

Cells are actions such as ``0F2``; empty cells (torch's bubbles) are left out. Torch's overlapped
pair ``(0F1;3B0)OVERLAP_F_B`` is read as ``0F1`` and then ``3B0``, since partc decides by itself
which transfers overlap. A written file reads back as the same schedule, in partc and in torch.
"""

from __future__ import annotations

import csv
import io
import re
from itertools import count
from pathlib import Path

from partc.errors import PlanError
from partc.file_text import Unreadable, file_text
from partc.schedules.actions import Action, Schedule, check_schedule
from partc.wrong_calls import quoted

CSV = ".csv"  # how the name of a schedule that is a file ends
_PAIR = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


def write_csv(schedule: Schedule) -> str:
    """The schedule as CSV text with one line per rank.

    >>> write_csv(Schedule("s", ((Action(0, "F", 0), Action(0, "B", 0)),), (0,), 1))
    '0F0,0B0\\n'
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(schedule.orders)
    return text.getvalue()


def load_csv(path: Path) -> Schedule:
    """The schedule in a CSV file, with the file's name as its name; PlanError if unreadable."""
    try:
        text = file_text(path)
    except Unreadable as error:
        raise PlanError(
            where=f"schedule={str(path)!r}", what="the file cannot be read", why=str(error),
            do="Check the path, or name a schedule that partc makes, for example 1f1b.",
        ) from None  # fmt: skip
    return read_csv(text, path.name)


def read_csv(text: str, name: str = "csv") -> Schedule:
    """The schedule of CSV text; row ``r`` has the actions of rank ``r``, and so gives its stages.

    PlanError names the row and column of a cell that is no action (sends and receives are none).
    PlanError as well if stages or microbatches are missing, occur twice, or occur on two ranks.
    """
    try:
        rows = list(csv.reader(io.StringIO(text)))
    except csv.Error as error:  # a cell of more than 100,000 letters
        raise PlanError(
            where=f"schedule {name}", what="is no CSV text", why=str(error),
            do="Write one row per pipeline rank, with cells such as 0F0.",
        ) from None  # fmt: skip
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    orders = tuple(
        tuple(
            action
            for column, cell in enumerate(row, 1)
            for action in _cell(cell, f"{name}, row {line}, column {column}")
        )
        for line, row in enumerate(rows, 1)
    )
    actions = [action for order in orders for action in order]
    if not actions:
        raise PlanError(
            where=f"schedule {name}", what="there is no action in it", why="",
            do="Write one row per pipeline rank, with cells such as 0F0.",
        )  # fmt: skip
    microbatches = 1 + max(action.microbatch for action in actions)
    schedule = Schedule(name, orders, _ranks(orders, name), microbatches)
    check_schedule(schedule)
    return schedule


def _cell(cell: str, where: str) -> list[Action]:
    pair = _PAIR.fullmatch(cell.strip())
    parts = pair.group(1).split(";") if pair else [cell]
    try:
        return [Action.parse(part) for part in parts if part.strip()]
    except PlanError as error:
        do = error.do
        if not pair and len(re.findall(r"[0-9][FBIW][0-9]", cell)) > 1:
            do = "Write a comma between two actions: 0F0,0F1."
        where = f"schedule {where}: {quoted(cell.strip())}"
        raise PlanError(where=where, what=error.what, why=error.why, do=do) from None


def _ranks(orders: tuple[tuple[Action, ...], ...], name: str) -> tuple[int, ...]:
    """The rank of every stage: the first row with the stage (`check_schedule` refuses a second)."""
    found: dict[int, int] = {}
    for rank, order in enumerate(orders):
        for action in order:
            found.setdefault(action.stage, rank)
    missing = next(stage for stage in count() if stage not in found)
    if missing < max(found):
        raise PlanError(
            where=f"schedule {name}",
            what=f"stage {missing} stands in no row",
            why=f"there is a stage {max(found)}, and stages are counted from 0",
            do="Add its actions to the row of the rank that runs it.",
        )
    return tuple(found[stage] for stage in range(len(found)))
