"""What ``@schedule`` takes: a name, and options, each of which is checked before it is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from partc.errors import UsageError
from partc.wrong_calls import did_you_mean, quoted

PLACEMENTS = ("looped", "v")
OF_V = (2, 2)  # a V goes through the ranks and back
_TAKEN = ("auto", ".csv")  # a name that means a schedule for the stages' costs; the end of a file's


class _Option(NamedTuple):
    fits: Callable[[Any], bool]
    why: str
    do: str


def _is_pair(given: Any) -> bool:
    if not isinstance(given, list | tuple) or len(given) != 2:
        return False
    least, most = given
    return _is_count(least) and (most is None or (_is_count(most) and least <= most))


def _is_count(given: Any) -> bool:
    return isinstance(given, int) and not isinstance(given, bool) and given >= 1


_OPTIONS = {
    "chunks": _Option(
        _is_pair, "it is a pair: the least and the most stages on each rank",
        "Write chunks=(2, 2) for exactly two, chunks=(1, None) for any number.",
    ),
    "split": _Option(
        lambda given: isinstance(given, bool),
        "it says whether backwards may be split into I and W", "Write split=True.",
    ),
    "placement": _Option(
        lambda given: isinstance(given, str) and given in PLACEMENTS,
        'it is "looped" (stages lie in turns) or "v" (through the ranks and back)',
        'Write placement="v", or leave it out for stages in turns.',
    ),
}  # fmt: skip


def check_name(name: Any) -> None:
    """UsageError for what is no name, or a name that a plan reads as something else."""
    if not isinstance(name, str) or not name:
        raise UsageError(
            where="@schedule", what=f"the name is {quoted(name)}", why="it must be a text",
            do='Write @schedule("my-schedule") above the function.',
        )  # fmt: skip
    if name == _TAKEN[0] or name.endswith(_TAKEN[1]):
        raise UsageError(
            where=f"@schedule({quoted(name)})", what="no plan can ask for this name",
            why=f"{_TAKEN[0]!r} is made for the costs of the stages, and what ends in "
            f"{_TAKEN[1]} is a file", do="Give the schedule another name.",
        )  # fmt: skip


def checked_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as they are kept; UsageError for one that there is not or that means nothing."""
    for option, given in options.items():
        _check(name, option, given)
    said = dict(options)
    if "chunks" in said:
        said["chunks"] = tuple(said["chunks"])
    if said.get("placement") == "v" and said.get("chunks") != OF_V:
        raise UsageError(
            where=f'@schedule({name!r}, placement="v")',
            what=f"chunks is {said.get('chunks', (1, 1))}",
            why="in a V each rank has two stages, one on the way there and one on the way back",
            do=f'Write chunks={OF_V} beside placement="v".',
        )
    return said


def _check(name: str, option: str, given: Any) -> None:
    if option not in _OPTIONS:
        raise UsageError(
            where=f"@schedule({name!r})", what=f"there is no option {option!r}",
            why=f"options are {', '.join(_OPTIONS)}",
            do=did_you_mean(option, _OPTIONS) or "Leave it out.",
        )  # fmt: skip
    fits, why, do = _OPTIONS[option]
    if not fits(given):
        do = did_you_mean(given, PLACEMENTS) or do if option == "placement" else do
        raise UsageError(
            where=f"@schedule({name!r}, {option}=...)", what=f"it is {quoted(given)}", why=why,
            do=do,
        )  # fmt: skip
