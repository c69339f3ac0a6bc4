"""The table ``[uneven]`` of a plan: islands compute as many microbatches as their speed allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, ClassVar

from partc.errors import UsageError
from partc.plan.entries import Entries, is_number, is_whole

UNEVEN = "uneven"  # the name of the table
MOST_MICROBATCHES = 1_000_000
WHOLE = -1  # the dim of an input without rows: every microbatch has all of it


@dataclass(frozen=True)
class Uneven:
    """How many microbatches of a step each island computes: the plan's table ``[uneven]``.

    ``microbatches``: by island; or the number of all islands, which is divided among them by the
    speeds of their machines. Gradients and loss of a step are their means over the microbatches of
    all islands. ``dims``: along which dim inputs have their rows, of those that have them not
    along dim 0; -1 for an input of which every microbatch has all.
    """

    microbatches: Sequence[int] | int
    dims: Mapping[str, int] = field(default_factory=dict)

    keeps: ClassVar[tuple[str, ...]] = ()  # nothing, from one step to the next

    @property
    def of_each(self) -> Sequence[int]:
        """The microbatches of each island, once they are divided."""
        assert not isinstance(self.microbatches, int)
        return self.microbatches

    @property
    def whole(self) -> int:
        """The microbatches of all islands in one step."""
        return sum(self.of_each)

    def dim_of(self, name: str) -> int | None:
        """The dim along which an input has rows; None if every microbatch has all of it."""
        dim = self.dims.get(name, 0)
        return None if dim == WHOLE else dim

    def lines(self) -> dict[str, str]:
        """The entries of the table as TOML, by name: those that say something."""
        from partc.plan.plan_text import quote

        given = self.microbatches
        found = {"microbatches": str(given if isinstance(given, int) else [*given])}
        if self.dims:
            dims = ", ".join(f"{quote(name)} = {dim}" for name, dim in self.dims.items())
            found["dims"] = f"{{ {dims} }}"
        return found


def shares(speeds: Sequence[float], microbatches: int) -> list[int]:
    """How many of a step's microbatches each island takes, so that the step ends soonest.

    A step lasts as long as the island that needs longest, microbatches over speed. Each island gets
    its share by speed, rounded down, and at least one. Each that is left goes to the island that
    would be through with it first: list scheduling (Graham 1969), which is optimal where all
    microbatches take equally long.

    Args:
        speeds: of the islands, in any unit, such as microbatches per second.
        microbatches: of all islands in one step; at least one for each.

    Returns:
        By island; their sum is ``microbatches``.

    Raises:
        UsageError: a speed is not above 0, or there are fewer microbatches than islands.

    >>> shares([1.0, 0.5], 16)
    [11, 5]
    """
    _check_speeds(speeds, microbatches)
    exact = [Fraction(speed) for speed in speeds]
    found = [max(1, int(microbatches * speed / sum(exact))) for speed in exact]
    while sum(found) < microbatches:
        ends = [(num + 1) / speed for num, speed in zip(found, exact, strict=True)]
        found[ends.index(min(ends))] += 1
    while sum(found) > microbatches:  # slow islands have more than their share: one
        ends = [(num > 1) * num / speed for num, speed in zip(found, exact, strict=True)]
        found[ends.index(max(ends))] -= 1
    return found


def _check_speeds(speeds: Sequence[float], microbatches: int) -> None:
    wrong = [each for each in speeds if not is_number(each) or not 0 < each < float("inf")]
    if wrong or not speeds:
        raise UsageError(
            where="shares(speeds)", what=f"a speed is {wrong[0]!r}" if wrong else "no speed",
            why="islands with the same speed take equally many microbatches",
            do="Give a number above 0 for each island, such as its microbatches per second.",
        )  # fmt: skip
    if not is_whole(microbatches) or not len(speeds) <= microbatches <= MOST_MICROBATCHES:
        raise UsageError(
            where="shares(microbatches)", what=f"{microbatches!r} for {len(speeds)} islands",
            why="each island computes at least one microbatch in a step",
            do=f"Give a whole number from {len(speeds)} to {MOST_MICROBATCHES:,}.",
        )  # fmt: skip


def read_uneven(table: Mapping[str, Any], where: str) -> Uneven:
    """The table of a plan.toml as Uneven; PlanError for an unknown or wrong entry."""
    made: Uneven = _ENTRIES.read(table, where)
    return made


def _is_microbatches(given: Any) -> str:
    numbers = given if isinstance(given, list | tuple) else [given]
    if numbers and all(is_whole(num) and 1 <= num <= MOST_MICROBATCHES for num in numbers):
        return ""
    return "it is a list of whole numbers from 1, one for each island, or their sum"


def _is_dims(given: Any) -> str:
    fits = isinstance(given, Mapping) and all(
        is_whole(dim) and WHOLE <= dim < 64 for dim in given.values()
    )
    return "" if fits else "it says the dim of each input's rows, or -1: { mask = -1 }"


_ENTRIES = Entries(
    UNEVEN, Uneven,
    {"microbatches": _is_microbatches, "dims": _is_dims},
    "microbatches = [11, 5]", "it does not say how many microbatches each island computes",
    told=dict.fromkeys(
        ("ratio", "ratios", "shares", "weights", "counts", "batch", "batches", "rows"),
        "Write microbatches = [11, 5], how many each island computes.",
    ),
)  # fmt: skip
