"""For which of the user's calls each line of a rank's text stands, shown where the line is shown.

A role's text names modules in sections, and no source line. Compiling notes both beside it
(``program.json``), so that tracebacks and debuggers show them behind the line, and an error that
arises in a program names the module and the line of the model:
``model.layers.3.mlp at net.py:42: x = self.up(x)``.
"""

from __future__ import annotations

import difflib
import linecache
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from partc.line_changes import line_changes

if TYPE_CHECKING:
    from partc.program.role import Role

Origin = tuple[str, str]  # a module's path, ``blocks.*.mlp`` in any block, and a source line
MOST_COMPARED = 40_000  # pairs of changed lines, of which the most similar are looked for
TEXT = "<partc "  # with this begin the names of files that ranks run
_LOADED: dict[str, str] = {}  # the text behind each name that tracebacks show


@dataclass(frozen=True)
class UserLines:
    """The user's call for which a line of a text stands, by the number of the line from 1."""

    of: Mapping[int, Origin] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Each different origin once, and for each line the index of its own."""
        each = list(dict.fromkeys(self.of.values()))
        index = {origin: i for i, origin in enumerate(each)}
        lines = [[line, index[origin]] for line, origin in self.of.items()]
        return {"calls": [list(origin) for origin in each], "lines": lines}

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> UserLines:
        """Read ``as_json``; KeyError and alike where entries are missing or malformed."""
        each = [(str(module), str(source)) for module, source in data["calls"]]
        return cls({int(line): each[int(i)] for line, i in data["lines"]})

    def moved(self, printed: str, edited: str) -> UserLines:
        """The same for a text that was edited: a line that was not changed keeps its call.

        A changed one has the call of the line in whose place it stands, or of the most similar one.
        """
        if printed == edited:
            return self
        old, new = printed.splitlines(), edited.splitlines()
        found: dict[int, Origin] = {}
        for _, start, end, first, last in line_changes(old, new):
            few = (end - start) * (last - first) <= MOST_COMPARED
            gone = {i: old[i] for i in range(start, end)} if few else {}
            for offset, to in enumerate(range(first, last)):
                same = end - start == last - first
                line = start + offset if same else _similar(new[to], gone)
                if line is not None and line + 1 in self.of:
                    found[to + 1] = self.of[line + 1]
        return UserLines(found)

    def beside(self, text: str) -> list[str]:
        """The lines of a text, each with the user's call behind it, for tracebacks."""
        lines = text.splitlines(keepends=True)
        for number, origin in self.of.items():
            if number <= len(lines):
                line = lines[number - 1].rstrip("\n")
                lines[number - 1] = f"{line}  # <- {at(*origin)}\n"
        return lines


def _similar(line: str, others: Mapping[int, str]) -> int | None:
    """The key of the most similar text; None if none is."""
    best = difflib.get_close_matches(line, others.values(), n=1)
    return next((key for key, text in others.items() if best == [text]), None)


def at(module: str, source: str) -> str:
    """A call of the user as text: ``layers.3.mlp at net.py:42``; ``loss`` outside of modules.

    >>> at("layers.3.mlp", "net.py:42: x = self.up(x)")
    'layers.3.mlp at net.py:42'
    """
    place = ":".join(source.split(":", 2)[:2])
    return f"{module or 'loss'} at {place}" if place else module


def show_lines(file_name: str, text: str, lines: UserLines) -> str:
    """Let tracebacks and debuggers show a text that is run from memory; its name for ``compile``.

    Two programs of one process may have files of the same name: a second text gets a number.
    """
    shown, number = f"{TEXT}{file_name}>", 1
    while _LOADED.get(shown, text) != text:
        number += 1
        shown = f"{TEXT}{file_name} {number}>"
    if shown not in _LOADED or lines.of:
        linecache.cache[shown] = (len(text), None, lines.beside(text), shown)
    _LOADED[shown] = text
    return shown


def file_of(shown: str) -> str:
    """The file's name in the name that tracebacks show.

    >>> file_of("<partc stage0.py 2>")
    'stage0.py'
    """
    return shown.removeprefix(TEXT).removesuffix(">").partition(" ")[0]


def path_in_model(module: str, block: Any, role: Role, step: Any) -> str:
    """``layers.*.mlp`` with the number of the block whose method was running.

    A class that several modules share has the path of one of them; that of the block follows from
    the names of its own parameters and buffers.
    """
    if "*" not in module or not isinstance(block, nn.Module):
        return module
    own = next((path for path, each in step.named_modules() if each is block), "")
    name = type(block).__name__.upper()
    for table in (vars(role.module).get(f"{name}_{kind}", {}) for kind in ("SHARDS", "BUFFERS")):
        for attribute, (suffix, *_) in table.items():
            held = (s for s in role.shards if s.key == f"{own}.{attribute}")
            layers = (s.name.removesuffix(f".{suffix}") for s in held)
            for layer in layers:
                return layer + module.partition("*")[2]
    layer = next(_modules_of(own, role), "")
    return layer + module.partition("*")[2] if layer else module


def _modules_of(own: str, role: Role) -> Iterator[str]:
    """The path in the model of the block at ``own``, for each parameter that is its own.

    Its ``convolution_weight`` is the model's ``stem.0.convolution.weight``: ``stem.0``
    """
    for shard in role.shards:
        holder, _, attribute = shard.key.rpartition(".")
        if holder == own:
            parts = shard.name.split(".")
            for at in range(1, len(parts)):
                if "_".join(parts[at:]) == attribute:
                    yield ".".join(parts[:at])
