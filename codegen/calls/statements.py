"""The statements of a function as lines: sections, and ``del`` where a value is read no more."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from torch import fx

from partc.codegen.calls.storage import num_bytes
from partc.codegen.text import Line, Text
from partc.quoting import comment, identifier

SMALL, BIG = 64, 2  # fractions of the biggest value: not worth a `del`, worth one at once


@dataclass
class Statement:
    """One or a few lines, the values they read and bind, and the module they stand for."""

    lines: list[Line]
    reads: list[fx.Node] = field(default_factory=list)
    binds: list[fx.Node] = field(default_factory=list)
    calls: list[fx.Node] = field(default_factory=list)  # what it does
    section: str | None = ""  # None: that of what follows


def with_sections(statements: Iterable[Statement], shown: Callable[[str], str] = str) -> list[Line]:
    """The lines of all statements, a comment with the module's path wherever it changes.

    A statement that stands alone for its module and names it needs none.
    """
    written = [s for s in statements if s.lines]
    sections = _sections(written)
    around = [each for each in sections if each]
    lines: list[Line] = []
    current, i = "", 0
    for statement, section in zip(written, sections, strict=True):
        if section not in ("", current) and not _says_so(statement, around, i):
            current = section
            lines.append(Line(f"# {comment(shown(section))}"))
        i += bool(section)
        lines += statement.lines
    return lines


def _sections(statements: Sequence[Statement]) -> list[str]:
    """The section that each statement stands in; a ``del`` has none and is in nobody's way."""
    sections: list[str] = []
    behind = ""
    for statement in reversed(statements):
        sections.append(behind if statement.section is None else statement.section)
        if statement.section or (statement.calls and statement.section is not None):
            behind = statement.section
    return sections[::-1]


def _says_so(statement: Statement, sections: Sequence[str], i: int) -> bool:
    """Whether a statement is the only one of its section there, the ``i``-th, and names it."""
    around = [*sections[max(i - 1, 0) : i], *sections[i + 1 : i + 2]]
    name = identifier(sections[i].rpartition(".")[2])
    named = any(re.search(rf"(?<![a-z]){name}(?![a-z])", line.code) for line in statement.lines)
    return sections[i] not in around and named


def free_early(
    statements: list[Statement], seen: Callable[[fx.Node], Text], kept: set[fx.Node]
) -> list[Statement]:
    """The statements, with a ``del`` for the values that nobody reads later.

    It stands at the end of a section, for the biggest values at once; what is small is left.
    """
    last = _last_uses(statements, seen)
    for node in kept:
        last.pop(str(seen(node)), None)
    sizes: dict[str, int] = {}
    for node in (n for s in statements for n in s.binds):
        sizes[str(seen(node))] = max(sizes.get(str(seen(node)), 0), num_bytes(node))
    biggest = max(sizes.values(), default=0)
    dying: dict[int, list[str]] = {}
    for name, i in sorted(last.items()):
        if sizes.get(name, 0) > biggest // SMALL and name.isidentifier():
            dying.setdefault(i, []).append(name)
    codes = (line.code for statement in statements for line in statement.lines)
    waited = {code.removesuffix(".wait()") for code in codes if code.endswith("_done.wait()")}
    dead: list[str] = []
    for i, (statement, following) in enumerate(pairwise(statements)):
        dead += dying.get(i, [])
        now = any(sizes[name] >= biggest // BIG for name in dead)
        if dead and (now or following.section != statement.section):
            handles = [f"{name}_done" for name in dead if f"{name}_done" in waited]
            statement.lines.append(deleted([*dead, *handles]))  # a handle keeps what it moved
            dead = []
    return statements


def deleted(names: Iterable[str]) -> Line:
    """The statement that drops some names."""
    listed = ", ".join(names)
    return Line(f"del {listed}" if len(listed) < 80 else f"del ({listed})")


def _last_uses(statements: list[Statement], seen: Callable[[fx.Node], Text]) -> dict[str, int]:
    """The last statement that reads or binds each name."""
    return {
        str(seen(node)): i
        for i, statement in enumerate(statements)
        for node in [*statement.reads, *statement.binds]
    }
