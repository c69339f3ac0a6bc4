"""A rank's actions as text.

What repeats becomes a loop, so that the length does not grow with the number of microbatches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from partc.codegen.text import Line
from partc.schedules.actions import Action, Kind

NESTED = 3 / 4  # loops within a loop are printed where they have at most this part of its lines


@dataclass(frozen=True)
class Turns:
    """Actions that repeat ``count`` times, each time ``advance`` microbatches further on, or back
    where that is negative.
    """

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
    if advance == 0 or actions[at + size][:2] != pattern[0][:2]:
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


def parted(actions: Iterable[Action]) -> Iterator[Action]:
    """``B`` as ``I`` and ``W``."""
    for action in actions:
        kinds: tuple[Kind, ...] = ("I", "W") if action.kind == "B" else (action.kind,)
        yield from (action._replace(kind=kind) for kind in kinds)


def whole_backwards(actions: Iterable[Action]) -> list[Action]:
    """``I`` and ``W`` of one microbatch as ``B`` where nothing stands between them.

    >>> print(*whole_backwards([Action.parse(a) for a in "0I0 0W0 0I1 0F2 0W1".split()]))
    0B0 0I1 0F2 0W1
    """
    found: list[Action] = []
    for action in actions:
        stage, kind, microbatch = action
        if kind == "W" and found and found[-1] == (stage, "I", microbatch):
            found[-1] = Action(stage, "B", microbatch)
        else:
            found.append(action)
    return found


def turn_lines(actions: Sequence[Action]) -> Iterator[Line]:
    """The loops of ``step``: warm-up, steady state, cool-down."""
    turns = rolled(actions)
    remarks = _remarks(turns)
    for index, each in enumerate(turns):
        if index in remarks:
            yield Line(f"# {remarks[index]}")
        yield from _lines(each)


def _remarks(turns: Sequence[Turns]) -> dict[int, str]:
    """What to say above which turns."""
    mixed = [i for i, each in enumerate(turns) if each.count > 1 and len(_kinds([each])) > 1]
    if not mixed:
        ways = [_only(_kinds([each])) for each in turns]
        return {i: way for i, way in enumerate(ways) if way and way not in ways[:i]}
    steady = max(mixed, key=lambda i: turns[i].length)
    remarks = {steady: f"steady state: {_rhythm(turns[steady])}"}
    for name, first, part in (
        ("warm-up", 0, turns[:steady]),
        ("cool-down", steady + 1, turns[steady + 1 :]),
    ):
        if part:
            remarks[first] = ": ".join(filter(None, (name, _only(_kinds(part)))))
    return remarks


def _kinds(turns: Iterable[Turns]) -> set[str]:
    """``F`` for forwards, ``B`` for any part of a backward."""
    return {"F" if a.kind == "F" else "B" for each in turns for a in each.actions}


def _only(kinds: set[str]) -> str:
    if len(kinds) > 1:
        return ""
    return "forwards" if "F" in kinds else "backwards"


def _rhythm(turns: Turns) -> str:
    """How many forwards and backwards a turn of the steady state has."""
    forwards = sum(a.kind == "F" for a in turns.actions)
    backwards = sum(a.kind in "BI" for a in turns.actions)
    return ", ".join(
        f"{number} {what}{'s' if number > 1 else ''}"
        for number, what in ((forwards, "forward"), (backwards, "backward"))
    )


def _lines(turns: Turns, outer: str = "") -> Iterator[Line]:
    """A loop over microbatches, of loops where that is clearly shorter; ``outer`` is the variable
    of the loop around it, which the actions count from.
    """
    if turns.count == 1:
        yield from (_call(a, outer, a.microbatch) for a in turns.actions)
        return
    first = min(a.microbatch for a in turns.actions)
    variable = "j" if outer else "i"
    yield Line(f"for {variable} in {_range(turns, first, outer)}:")
    shifted = [a._replace(microbatch=a.microbatch - first) for a in turns.actions]
    inner = [] if outer else [line for each in rolled(shifted) for line in _lines(each, "i")]
    if not inner or len(inner) > NESTED * len(shifted):
        inner = [_call(a, variable, a.microbatch) for a in shifted]
    yield from (replace(line, indent=line.indent + 1) for line in inner)


def _call(action: Action, variable: str, microbatch: int) -> Line:
    return Line(f"self.{action.kind}({action.stage}, {_from(variable, microbatch)})")


def _range(turns: Turns, first: int, outer: str) -> str:
    """The microbatches of a loop.

    >>> _range(Turns((), 4, -1), 3, ""), _range(Turns((), 3, 2), 1, "i")
    ('reversed(range(4))', 'range(i + 1, i + 7, 2)')
    """
    end = first + turns.count * turns.advance
    if turns.advance == -1:
        return f"reversed({_range(Turns((), turns.count), end + 1, outer)})"
    start, stop = _from(outer, first), _from(outer, end)
    if turns.advance != 1:
        return f"range({start}, {stop}, {turns.advance})"
    return f"range({start}, {stop})" if start != "0" else f"range({stop})"


def _from(variable: str, ahead: int) -> str:
    """So many microbatches ahead of a loop's variable."""
    if not variable:
        return str(ahead)
    return variable if ahead == 0 else f"{variable} {'+' if ahead > 0 else '-'} {abs(ahead)}"
