"""How plans and texts of two programs differ: entries in words, lines as ``diff -u`` shows them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from partc.errors import LoadError
from partc.file_text import Unreadable, toml_table
from partc.line_changes import comparable

LAYOUTS = ("params", "inputs", "values")  # tables of the plan that say how tensors lie
NONE = "none"


@dataclass(frozen=True)
class Difference:
    """One thing that differs: what it is (under a ``topic``), and how it was and is, as text."""

    topic: str
    what: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.what}: {self.old} -> {self.new}" if self.old or self.new else self.what


def plan_changes(old: str, new: str) -> Iterator[Difference]:
    """The keys of two plans; of the tables that say how tensors lie each entry."""
    before, after = toml_of(old, "plan.toml"), toml_of(new, "plan.toml")
    notes = [_listed(plan.pop("notes", [])) for plan in (before, after)]
    layouts = [key for key in LAYOUTS if all(type(p.get(key, {})) is dict for p in (before, after))]
    for key in dict.fromkeys([*before, *after]):
        if key not in layouts:
            yield from changed("plan", key, *(_text(plan.get(key)) for plan in (before, after)))
    gone, come = ([n for n in notes[i] if n not in notes[1 - i]] for i in (0, 1))
    yield from (Difference("plan", f"no longer noted: {note}", "", "") for note in gone)
    yield from (Difference("plan", f"now noted: {note}", "", "") for note in come)
    for key in layouts:
        each = [{n: _text(e) for n, e in plan.get(key, {}).items()} for plan in (before, after)]
        yield from entries("layouts", f"{key} ", *each)


def toml_of(text: str, where: str) -> dict[str, Any]:
    """The table of a TOML text in a folder that anybody may have written."""
    try:
        return toml_table(text)
    except Unreadable as error:
        raise LoadError(
            where=where, what="it is not TOML", why=str(error),
            do="Undo the edit, or compile and save again.",
        ) from None  # fmt: skip


def _listed(given: Any) -> list[Any]:
    return given if isinstance(given, list) else [given]


def _text(value: Any) -> str:
    """A value of a plan as it stands there; ``none`` for what is not there."""
    if value is None:
        return NONE
    if isinstance(value, dict):
        entries = ", ".join(f"{key} = {_text(entry)}" for key, entry in value.items())
        return f"{{ {entries} }}" if value else "{}"
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{', '.join(map(_text, value))}]" if isinstance(value, list) else str(value).strip()


def unified(
    name: str, old: str, new: str, folders: tuple[str, str], context: int = 3
) -> Iterator[str]:
    """The lines of a file that differ, as ``diff -u`` shows them, with lines around them."""
    one, other = (f"{folder}/{name}" for folder in folders)
    before, after = old.splitlines(), new.splitlines()
    if comparable(before, after):
        return difflib.unified_diff(before, after, one, other, n=context, lineterm="")
    told = f"a line is repeated too often to compare {len(before)} lines with {len(after)}"
    return iter((f"--- {one}", f"+++ {other}", told))


def changed(topic: str, what: str, old: str, new: str) -> Iterator[Difference]:
    """The difference of one thing, if there is one."""
    if old != new:
        yield Difference(topic, what, old, new)


def entries(
    topic: str, what: str, old: Mapping[str, str], new: Mapping[str, str]
) -> Iterator[Difference]:
    """The entries of two tables; one that only one of them has is ``none`` in the other."""
    for name in dict.fromkeys([*old, *new]):
        yield from changed(topic, f"{what}{name}", old.get(name, NONE), new.get(name, NONE))
