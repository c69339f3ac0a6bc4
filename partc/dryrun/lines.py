"""Find the line of one source file that corresponds to a line of another.

The memory of a turn is noted by source line (``turns.py``). The files of other pipeline ranks
contain much of the same text at other lines, and partly with other names of classes and functions.
"""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

_NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*")
_MADE = "__init__"  # runs before the step, so its text does not matter here
Part = tuple[str, str]  # a class and its method; a function and nothing


@dataclass(frozen=True)
class SourceLines:
    """A source file: its lines without comments, and the line numbers of functions and methods."""

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
        """The parts (methods, or the function itself) of each class or function."""
        found: dict[str, list[Part]] = {}
        for name, part in self.parts:
            found.setdefault(name, []).append((name, part))
        return found

    @cached_property
    def at(self) -> dict[int, tuple[Part, int]]:
        """A line number -> the part that contains the line, and the offset in the part."""
        return {line: (p, i) for p, lines in self.parts.items() for i, line in enumerate(lines)}

    def code(self, name: str) -> list[str]:
        """The lines of a class or function, without ``__init__``, which is not part of a step."""
        parts = (part for part in self.names[name] if part[1] != _MADE)
        return [self.lines[line - 1] for part in parts for line in self.parts[part]]

    def used_by(self, classes: Iterable[str]) -> list[str]:
        """These classes, and all classes and functions they use, in the order of their mention."""
        found = dict.fromkeys(name for name in classes if name in self.names)
        for each in _growing(found):
            words = (word for text in self.code(each) for word in _NAME.findall(text))
            found |= {word: None for word in words if word in self.names}
        return [*found]

    def meaning(self, classes: Iterable[str]) -> tuple[str, ...]:
        """The text of classes and all that they use, with names replaced by numbers.

        Equal for classes of two files that do the same under different names.
        """
        order = {name: f"<{i}>" for i, name in enumerate(self.used_by(classes))}
        return tuple(
            _NAME.sub(lambda word: order.get(word[0], word[0]), text)
            for name in order
            for text in self.code(name)
        )

    def line_for(self, line: int, there: SourceLines, called: dict[str, str]) -> int | None:
        """The line of this file that corresponds to a line of the file ``there``; None without one.

        ``called``: the name of a class or function there -> its name here.
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
    """Every key of a dict, including keys that are added during the iteration."""
    done = 0
    while done < len(found):
        yield [*found][done]
        done += 1
