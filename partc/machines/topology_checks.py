"""Checks of a machine's figures; each PlanError names the figure and its allowed range."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from partc.errors import PlanError


def check_number(where: str, number: Any, most: float) -> None:
    """PlanError unless ``number`` is above 0 and at most ``most``."""
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if not is_number or not 0 < number <= most:  # NaN is neither
        do = "Write a number, without a unit and quotation marks: 2.5e10." * (not is_number)
        why = f"it is a number above 0 and at most {most:g}"
        raise refusal(where, f"{number!r} cannot be", why, do or "Correct the figure.")


def check_whole(where: str, number: Any, most: float) -> None:
    """PlanError unless ``number`` is a whole one from 1 to ``most``."""
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= most:
        raise refusal(where, f"{number!r} cannot be", f"it is a whole number from 1 to {most:g}")


def check_name(where: str, name: Any) -> None:
    """PlanError unless ``name`` is text on one line."""
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise refusal(where, f"{name!r} is not a name", "a name is text on one line")


def check_keys(where: str, keys: Iterable[str], known: Iterable[str]) -> None:
    """PlanError at the first unknown key."""
    known = sorted(known)
    for key in sorted(keys):
        if key not in known:
            raise refusal(where, f"{key!r} is unknown", f"known are {', '.join(known)}")


def check_pair(where: str, pair: Any, most: float) -> None:
    """PlanError unless ``pair`` is two numbers above 0 and at most ``most``."""
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise refusal(where, f"{pair!r} is no pair", "it is a pair of numbers")
    for number in pair:
        check_number(where, number, most)


def check_points(where: str, points: Any) -> None:
    """PlanError unless ``points`` are pairs (work, fraction of the peak).

    Work must ascend, no fraction may be above 1, and more work must never take less time.
    """
    if not isinstance(points, tuple) or not points:
        raise refusal(where, "it has no points", "it is a list of pairs [work, fraction]")
    for point in points:
        if not isinstance(point, tuple) or len(point) != 2:
            raise refusal(where, f"{point!r} is not a point", "a point is a pair [work, fraction]")
        check_number(f"{where}, work", point[0], 1e30)
        check_number(f"{where}, fraction", point[1], 1.0)
    for (less, low), (more, high) in pairwise(points):
        if less >= more or less / low > more / high:
            raise refusal(
                where,
                f"{more:g} at {high:g} after {less:g} at {low:g}",
                "work ascends, and more of it does not take less time",
            )


def refusal(where: str, what: str, why: str, do: str = "Correct the figure.") -> PlanError:
    return PlanError(where=where, what=what, why=why, do=do)
