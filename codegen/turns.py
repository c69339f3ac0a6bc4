"""A rank's actions as text.

What repeats becomes a loop, so that the length does not grow with the number of microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from partc.codegen.text import Line
from partc.schedules.actions import Action


@dataclass(frozen=True)
class Turns:
    """Actions that repeat ``count`` times, each time ``advance`` microbatches further on."""

    actions: tuple[Action, ...]
    count: int = 1
    advance: int = 1

    @property
    def length(self) -> int:
        return self.count * len(self.actions)


def rolled(actions: Sequence[Action]) -> list[Turns]:
    """The same actions in order, as few and as long repetitions as a greedy look ahead finds."""
    found: list[Turns] = []
    at = 0
    while at < len(actions):
        turns = _longest(actions, at)
        if turns.count == 1 and found and found[-1].count == 1:
            turns = Turns(found.pop().actions + turns.actions)
            at += 1
        else:
            at += turns.length
        found.append(turns)
    return found


def _longest(actions: Sequence[Action], at: int) -> Turns:
    """The repetition from ``at`` on that covers most; of equal ones the shortest pattern."""
    best = Turns((actions[at],))
    for size in range(1, (len(actions) - at) // 2 + 1):
        turns = _repeated(actions, at, size)
        if turns.count > 1 and turns.length > best.length:
            best = turns
    return best


def _repeated(actions: Sequence[Action], at: int, size: int) -> Turns:
    """How often the next ``size`` actions repeat."""
    pattern = tuple(actions[at : at + size])
    advance = actions[at + size].microbatch - pattern[0].microbatch
    if advance < 1 or actions[at + size][:2] != pattern[0][:2]:
        return Turns(pattern)
    count = 1
    while _follows(actions, at + count * size, pattern, count * advance):
        count += 1
    return Turns(pattern, count, advance)


def _follows(actions: Sequence[Action], at: int, pattern: Sequence[Action], advance: int) -> bool:
    if at + len(pattern) > len(actions):
        return False
    return all(
        here.stage == first.stage
        and here.kind == first.kind
        and here.microbatch == first.microbatch + advance
        for here, first in zip(actions[at : at + len(pattern)], pattern, strict=True)
    )


def turn_lines(actions: Sequence[Action]) -> Iterator[Line]:
    """The loops of ``step``: warm-up, steady state, cool-down."""
    turns = rolled(actions)
    steady = max(range(len(turns)), key=lambda i: (turns[i].length * (turns[i].count > 1), -i))
    for index, each in enumerate(turns):
        if index == 0 and steady > 0:
            yield Line("# warm-up")
        if index == steady and len(turns) > 1:
            yield Line("# steady state")
        if index == steady + 1:
            yield Line("# cool-down")
        yield from _lines(each)


def _lines(turns: Turns) -> Iterator[Line]:
    if turns.count == 1:
        yield from (Line(f"self.{a.kind}({a.stage}, {a.microbatch})") for a in turns.actions)
        return
    first = min(a.microbatch for a in turns.actions)
    if turns.advance == 1:
        yield Line(f"for i in {_range(first, first + turns.count)}:")
    else:
        yield Line(
            f"for i in range({first}, {first + turns.count * turns.advance}, {turns.advance}):"
        )
    for action in turns.actions:
        ahead = action.microbatch - first
        where = f"i + {ahead}" if ahead else "i"
        yield Line(f"self.{action.kind}({action.stage}, {where})", indent=1)


def _range(start: int, end: int) -> str:
    return f"range({start}, {end})" if start else f"range({end})"
