"""Checks of a machine's figures; each PlanError names the figure and its allowed range."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from partc.errors import PlanError
from partc.wrong_calls import did_you_mean

_POINTS = "Write pairs: [[1e9, 0.3], [1e12, 0.7]]."
_WITHOUT_UNIT = "Write a number, without a unit and quotation marks: 2.5e10."


def check_number(where: str, number: Any, most: float) -> None:
    """PlanError unless ``number`` is above 0 and at most ``most``."""
    if not is_number(number) or not 0 < number <= most:  # NaN is neither
        do = "" if is_number(number) else _WITHOUT_UNIT
        why = f"it is a number above 0 and at most {most:g}"
        raise refusal(where, f"{number!r} cannot be", why, do or _instead(where, number, most))


def _instead(where: str, number: Any, most: float) -> str:
    """What to write for a number that cannot be: percent for a share, another unit."""
    if where.endswith("_s") and not where.endswith("per_s"):
        return "The unit is seconds: 6 us are 6e-6."
    if most == 1 and is_number(number) and 1 < number <= 100:
        return f"Write a share: {number:g} % are {number / 100:g}."
    return f"Write a number above 0 and at most {most:g}."


def is_number(given: Any) -> bool:
    return isinstance(given, int | float) and not isinstance(given, bool)


def check_whole(where: str, number: Any, most: float) -> None:
    """PlanError unless ``number`` is a whole one from 1 to ``most``."""
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= most:
        do = f"Write a whole number from 1 to {most:g}."
        if isinstance(number, str) and number.isdecimal() and 1 <= int(number) <= most:
            do = f"Write {int(number):_}, without quotation marks."
        elif isinstance(number, str):
            do = "Write a whole number, without a unit and quotation marks: 16_000_000_000."
        elif isinstance(number, float) and number.is_integer() and 1 <= number <= most:
            do = f"Write it as a whole number: {int(number):_}."
        why = f"it is a whole number from 1 to {most:g}"
        raise refusal(where, f"{number!r} cannot be", why, do)


def check_name(where: str, name: Any) -> None:
    """PlanError unless ``name`` is text on one line."""
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise refusal(
            where,
            f"{name!r} is not a name",
            "a name is text on one line",
            'Write a text: name = "mine".',
        )


def check_keys(where: str, keys: Iterable[str], known: Iterable[str], do: str = "") -> None:
    """PlanError at the first unknown key; ``do`` is what to write where no known one is near."""
    known = sorted(known)
    for key in sorted(keys):
        if key not in known:
            do = did_you_mean(key, known) or do or "Take one of these, or leave it out."
            raise refusal(where, f"{key!r} is unknown", f"known are {', '.join(known)}", do)


# What the slowest and smallest device or link has; less is a figure in another unit. By key the
# least, the unit, and how a data sheet's figure is written in it.
LEAST = {
    "flops_per_s": (1e6, "FLOP/s", "312 TFLOP/s are 312e12"),
    "memory_bytes": (1e6, "bytes", "80 GB are 80_000_000_000"),
    "memory_bytes_per_s": (1e6, "bytes per second", "2 TB/s are 2e12"),
    "bytes_per_s": (1e3, "bytes per second", "25 GB/s are 25e9, 200 Gbit/s as well"),
}


def check_unit(where: str, key: str, number: Any) -> None:
    """PlanError for a figure of a file that is so small that it is in another unit."""
    least, unit, example = LEAST[key]
    if is_number(number) and 0 < number < least:
        raise refusal(
            where, f"{number:g} {unit} are less than any machine has", f"the unit is {unit}",
            f"Write the figure in {unit}: {example}.",
        )  # fmt: skip


def check_pair(where: str, pair: Any, most: float) -> None:
    """PlanError unless ``pair`` is two numbers above 0 and at most ``most``."""
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise refusal(
            where,
            f"{pair!r} is no pair",
            "it is a pair of numbers",
            "Write two numbers in brackets, [1.0, 0.5].",
        )
    for number in pair:
        check_number(where, number, most)


def check_points(where: str, points: Any) -> None:
    """PlanError unless ``points`` are pairs (work, fraction of the peak).

    Work must ascend, no fraction may be above 1, and more work must never take less time.
    """
    if not isinstance(points, tuple) or not points:
        raise refusal(where, "it has no points", "it is a list of pairs [work, fraction]", _POINTS)
    for point in points:
        if not isinstance(point, tuple) or len(point) != 2:
            raise refusal(
                where, f"{point!r} is not a point", "a point is a pair [work, fraction]", _POINTS
            )
        check_number(f"{where}, work", point[0], 1e30)
        check_number(f"{where}, fraction", point[1], 1.0)
    for (less, low), (more, high) in pairwise(points):
        least = less and low * less / more
        if less >= more or less / low > more / high:
            raise refusal(
                where,
                f"{more:g} at {high:g} after {less:g} at {low:g}",
                "work ascends, and more of it does not take less time",
                f"Write points by ascending work, or a fraction from {least:g} on for {more:g}.",
            )


def refusal(where: str, what: str, why: str, do: str) -> PlanError:
    return PlanError(where=where, what=what, why=why, do=do)
