"""Lines of one source file as lines of another that has the same classes and functions.

What a turn does to memory is noted by source line (``dry_turns``). The files of other pipeline
ranks have much of the same text elsewhere, some of it under other names.
"""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

_NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*")
_MADE = "__init__"  # its work is done before the step
Part = tuple[str, str]  # a class and its method; a function and nothing


@dataclass(frozen=True)
class SourceLines:
    """A file: its lines without comments, and where its functions and methods are."""

    file: str
    lines: tuple[str, ...] = field(compare=False)
    parts: dict[Part, range] = field(compare=False)  # of line numbers

    @classmethod
    def of(cls, file: str) -> SourceLines:
        lines = linecache.getlines(file)
        code = tuple(line.partition("  #")[0].strip() for line in lines)
        return cls(file, code, dict(_parts(ast.parse("".join(lines)))))

    @cached_property
    def names(self) -> dict[str, list[Part]]:
        """What each class or function consists of."""
        found: dict[str, list[Part]] = {}
        for name, part in self.parts:
            found.setdefault(name, []).append((name, part))
        return found

    @cached_property
    def at(self) -> dict[int, tuple[Part, int]]:
        """Of which part, and where in it, a line is."""
        return {line: (p, i) for p, lines in self.parts.items() for i, line in enumerate(lines)}

    def code(self, name: str) -> list[str]:
        """What a class or function does in a step."""
        parts = (part for part in self.names[name] if part[1] != _MADE)
        return [self.lines[line - 1] for part in parts for line in self.parts[part]]

    def used_by(self, classes: Iterable[str]) -> list[str]:
        """Classes and all that they come to call, in the order in which they name it."""
        found = dict.fromkeys(name for name in classes if name in self.names)
        for each in _growing(found):
            words = (word for text in self.code(each) for word in _NAME.findall(text))
            found |= {word: None for word in words if word in self.names}
        return [*found]

    def meaning(self, classes: Iterable[str]) -> tuple[str, ...]:
        """What classes do, with all that they call, whatever these are called."""
        order = {name: f"<{i}>" for i, name in enumerate(self.used_by(classes))}
        return tuple(
            _NAME.sub(lambda word: order.get(word[0], word[0]), text)
            for name in order
            for text in self.code(name)
        )

    def line_for(self, line: int, there: SourceLines, called: dict[str, str]) -> int | None:
        """The line here that says what a line says ``there``, whose classes and functions are
        ``called`` so here; None if there is none.
        """
        if not line or there == self:
            return line
        (name, method), offset = there.at.get(line, (("", ""), 0))
        lines = self.parts.get((called.get(name, name), method), range(0))
        if offset >= len(lines):
            return None
        same = name in called or self.lines[lines[offset] - 1] == there.lines[line - 1]
        return lines[offset] if same else None


def _parts(module: ast.Module) -> Iterator[tuple[Part, range]]:
    for node in module.body:
        for inner in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(inner, ast.FunctionDef):
                name = node.name if isinstance(node, ast.ClassDef) else inner.name
                method = inner.name if inner is not node else ""
                yield (name, method), range(inner.lineno, (inner.end_lineno or inner.lineno) + 1)


def _growing(found: dict[str, None]) -> Iterator[str]:
    """Every key, also those that come while this runs."""
    done = 0
    while done < len(found):
        yield [*found][done]
        done += 1
