"""How many numbers ranks have sent in sums by threshold, whose size nobody knows before."""

from __future__ import annotations

from typing import Any

from partc.errors import UsageError
from partc.plan.wires import THRESHOLD, WIRES
from partc.program.stage.runtime import Stage
from partc.wrong_calls import quoted


def sent_counts(stage: Any) -> list[list[int]]:
    """How many numbers each rank has sent in the sums by threshold since the last call.

    Of a plan with ``wire = "threshold"``; of any other plan it is empty.

    Args:
        stage: what ``program.module()`` gave.

    Returns:
        A list for each sum, in the order in which they were made, with a count for each rank that
        sums. The last 1024 sums are kept. For each of them this rank has sent
        ``(len(counts) - 1) * (8 * max(counts) + 4)`` bytes.

    Raises:
        UsageError: it is no stage.

    Example::

        loss = stage.step(*batch)
        sent = [sum(counts) for counts in sent_counts(stage)]
    """
    if not isinstance(stage, Stage):
        raise UsageError(
            where="sent_counts", what=f"the stage is {quoted(stage)}",
            why="the sums of this rank's stage are counted",
            do="Make it, stage = program.module(), and pass that.",
        )  # fmt: skip
    found: list[list[int]] = []
    for member in stage._own.members.values():
        made = member.role.module.__dict__.get(WIRES[THRESHOLD].helper)
        if made is not None:
            found += made.log
            made.log.clear()
    return found
