"""The numbers that servers and workers are made with: refused out of their range, as a negative
bound would let each wait for the other.
"""

from __future__ import annotations

from math import isfinite
from typing import Any

from partc.errors import UsageError
from partc.plan.servers import MOST_LATE
from partc.wrong_calls import check_whole_number, quoted

MOST_REPLICAS = 1


def check_late(given: Any, where: str) -> None:
    """UsageError unless so many updates may lie between a gradient's parameters and its update."""
    _check_range(given, f"{where}(max_steps_late=...)", MOST_LATE, "how late a gradient may be")


def check_replicas(given: Any, where: str) -> None:
    """UsageError unless a server can have so many replicas."""
    _check_range(given, f"{where}(replicas=...)", MOST_REPLICAS, "how many processes take over")


def _check_range(given: Any, where: str, most: int, why: str) -> None:
    if check_whole_number(given, where) > most:
        raise UsageError(
            where=where, what=f"{given} is above {most}", why=f"it says {why}",
            do=f"Give a whole number from 0 to {most}.",
        )  # fmt: skip


def check_deadline(given: Any, where: str) -> None:
    """UsageError unless a wait can end behind so many seconds."""
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    if not is_number or not isfinite(given) or given <= 0:
        raise UsageError(
            where=f"{where}(deadline_s=...)", what=f"it is {quoted(given)}",
            why="it says for how many seconds one process waits for another",
            do="Give a number above 0, longer than a step takes: deadline_s=60.",
        )  # fmt: skip
