"""Which statements of a text are not as they were printed, and which printed ones are gone."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from partc.program.fixed_text import statements

DECIDING = (ast.If, ast.IfExp, ast.While, ast.BoolOp)
Place = tuple[str, int]  # file and line


@dataclass(frozen=True)
class Changes:
    """The lines of statements that were changed: where they stand now, and where they stood.

    ``conditions``: those of now that do one thing or another, by what a value is.
    """

    now: frozenset[Place] = frozenset()
    printed: frozenset[Place] = frozenset()
    conditions: frozenset[Place] = frozenset()

    @classmethod
    def of(cls, printed: Mapping[str, str], now: Mapping[str, str]) -> Changes:
        ours, theirs = _statements(printed), _statements(now)
        fresh = frozenset(_lines(theirs, ours))
        conditions = {
            (file, each.lines[0])
            for (file, _), places in theirs.items()
            for each in places
            if each.decides and (file, each.lines[0]) in fresh
        }
        return cls(fresh, frozenset(_lines(ours, theirs)), frozenset(conditions))

    def __bool__(self) -> bool:
        return bool(self.now or self.printed)

    def __str__(self) -> str:
        """The first lines of the edits: ``stage0.py:12, stage0.py:40``."""
        lines = self.now or self.printed
        firsts = [p for p in sorted(lines) if (p[0], p[1] - 1) not in lines]
        told = [f"{file}:{line}{'' if self.now else ' as printed'}" for file, line in firsts[:4]]
        return ", ".join([*told, *[f"{len(firsts) - 4} more"] * (len(firsts) > 4)])


@dataclass(frozen=True)
class _Statement:
    lines: range
    decides: bool


Statements = dict[tuple[str, str], list[_Statement]]  # by file and text


def _statements(texts: Mapping[str, str]) -> Statements:
    found: Statements = {}
    for file, text in texts.items():
        for key, lines, head in statements(ast.parse(text)):
            decides = any(isinstance(n, DECIDING) for each in head for n in ast.walk(each))
            found.setdefault((file, key), []).append(_Statement(lines, decides))
    return found


def _lines(mine: Statements, theirs: Statements) -> Iterator[Place]:
    """The lines of statements that the other text has not, or not as often."""
    for key, places in mine.items():
        if len(places) != len(theirs.get(key, ())):
            yield from ((key[0], line) for each in places for line in each.lines)
