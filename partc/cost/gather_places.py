"""Where a program starts the gathers of following runs, for a prediction that walks its events.

So do the lines of a program (``codegen/bodies/step.py``): a block's weights are gathered while the
block before it in its loop computes, those of a loop's first blocks between two loops, as late as
the calls that follow hide them, or with the last block before, where one of both loops is a single
block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

from partc.cost.gather_order import hidden_by
from partc.cost.step_events import CALL, Call, Event, Execution


class Begun(NamedTuple):
    """How many runs have begun their gathers: as a run begins, and before its event ``place``."""

    first: int
    place: int
    then: int


def gather_places(
    runs: Sequence[Execution], calls: Sequence[Call], prefetch: int = 1
) -> Iterator[Begun]:
    """For each run in order, the runs whose gathers of parameters have begun with it, and in it.

    ``prefetch``: of how many blocks between two loops.
    """
    begun = 0
    for number, ran in enumerate(runs):
        begun = max(begun, number + 1)
        if ran.label:
            begun = max(begun, _begun_with(runs, number))
            yield Begun(begun, 0, begun)
            continue
        behind = runs[number + 1 : number + 2]
        first, place = begun, 0
        if behind and behind[0].label and begun == number + 1:
            between = bool(ran.run.events) and any(each.label for each in runs[:number])
            num = prefetch if between else 1
            wanted = num * sum(_flops(behind[0].run.events, calls))
            place = hidden_by(_flops(ran.run.events, calls), wanted)
            begun += min(num, _left(runs, number + 1))
        yield Begun(first, place, begun)


def _begun_with(runs: Sequence[Execution], number: int) -> int:
    """How many runs have begun their gathers as a block begins."""
    following = number + 1
    if following == len(runs) or _is_one_loop(runs, number):
        return following + 1
    if runs[following].label:  # a loop that comes right behind a loop
        return following + _is_begun_early(runs, number, following)
    later = following + 1  # behind calls outside of blocks
    return later + (later < len(runs) and _is_begun_early(runs, number, later))


def _is_begun_early(runs: Sequence[Execution], number: int, other: int) -> bool:
    """Whether a loop's first gathers start with the last block of the loop before.

    A block that runs next once more cannot gather for both at once.
    """
    if not runs[other].label or runs[other].label == runs[number].label:
        return False
    return any(_left(runs, at) == 1 and not _is_one_loop(runs, at - 1) for at in (number, other))


def _left(runs: Sequence[Execution], number: int) -> int:
    """How many blocks of a loop there are from a run on."""
    return 1 + sum(
        1 for _ in takewhile(lambda at: _is_one_loop(runs, at), range(number, len(runs)))
    )


def _is_one_loop(runs: Sequence[Execution], number: int) -> bool:
    """Whether a run and the next are blocks of one loop: of one list, in one direction."""
    if not 0 <= number < len(runs) - 1:
        return False
    one, other = runs[number], runs[number + 1]
    lists = {each.label.rpartition(".")[0] for each in (one, other)}
    return all((one.label, other.label, len(lists) == 1)) and (
        one.run.is_backward == other.run.is_backward
    )


def _flops(events: Sequence[Event], calls: Sequence[Call]) -> list[int]:
    return [calls[each.number].flops if each.code == CALL else 0 for each in events]
