"""What differs between two saved programs, in words: plan, layouts, transfers, memory, time, text.

Reads what was saved with them; runs nothing of either.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from partc.amounts import amount, counted, time_text
from partc.line_changes import line_changes
from partc.program import Program
from partc.program.hooks import NAME as HOOKS
from partc.reports.changes import (
    NONE,
    Difference,
    changed,
    entries,
    plan_changes,
    toml_of,
    unified,
)  # fmt: skip
from partc.reports.numbers_of import message_bytes, peaks, seconds, transfers

ROLES = "roles"
MOST = 20  # tensors of a model that are named


@dataclass(frozen=True)
class Differences:
    """All that differs, and the lines of each file that do, as ``diff -u`` shows them."""

    rows: tuple[Difference, ...]
    sources: Mapping[str, tuple[str, ...]]

    def __bool__(self) -> bool:
        return bool(self.rows)

    def __str__(self) -> str:
        lines = []
        for topic, rows in groupby(self.rows, lambda row: row.topic):
            lines += [f"{topic if i == 0 else '':<10} {row}" for i, row in enumerate(rows)]
        shown = [line for each in self.sources.values() for line in each]
        return "\n".join([*lines, *([""] if shown else []), *shown]) or "no difference"

    def as_json(self) -> dict[str, Any]:
        """Topic -> what -> [old, new]; ``sources``: the lines of each file that differ."""
        told: dict[str, Any] = {}
        for row in self.rows:
            told.setdefault(row.topic, {})[row.what] = [row.old, row.new]
        return {**told, "sources": {name: list(lines) for name, lines in self.sources.items()}}


def differences(old: Program, new: Program, folders: tuple[str, str]) -> Differences:
    """Compare two programs; ``folders`` are their names in the lines of their files."""
    rows = [*_of_model(old, new), *plan_changes(old.plan, new.plan), *_of_machine(old, new)]
    rows += [*_of_transfers(old, new), *_of_memory(old, new), *_of_time(old, new)]
    rows += [*_of_roles(old, new)]
    before, after = _files(old), _files(new)
    names = sorted(before.keys() & after.keys())
    texts = ((name, before[name], after[name]) for name in names)
    sources = {n: tuple(unified(n, a, b, folders)) for n, a, b in texts if a != b}
    for number, (one, other) in enumerate(zip(old.others, new.others, strict=False)):
        place = f"programs/{number}"
        found = differences(one, other, (f"{folders[0]}/{place}", f"{folders[1]}/{place}"))
        rows += [Difference(f"{place}, {r.topic}", r.what, r.old, r.new) for r in found.rows]
        sources |= {f"{place}/{name}": lines for name, lines in found.sources.items()}
    return Differences(tuple(rows), sources)


# model, plan, machine -------------------------------------------------------------------------
def _of_model(old: Program, new: Program) -> Iterator[Difference]:
    yield from changed("model", "class", old.model, new.model)
    tensors = [{n: str(spec) for n, spec in p.fingerprint.tensors.items()} for p in (old, new)]
    rows = [*entries("model", "", *tensors)]
    yield from rows[:MOST]
    if len(rows) > MOST:
        yield Difference("model", f"{len(rows) - MOST} more tensors", "", "")
    each = [{n: f"{d}{list(s)}" for n, (s, d) in p.inputs.items()} for p in (old, new)]
    yield from entries("model", "input ", *each)
    many = [str(len(program.others)) for program in (old, new)]
    yield from changed("model", "programs of other shapes and modes", *many)


def _of_machine(old: Program, new: Program) -> Iterator[Difference]:
    if old.basis.machine != new.basis.machine:
        texts = (p.basis.machine or "" for p in (old, new))
        names = [str(toml_of(text, "machine of the basis").get("name", NONE)) for text in texts]
        what = "planned for other machines"
        yield Difference("machine", what, *(names if names[0] != names[1] else ("", "")))


# costs ------------------------------------------------------------------------------------------
def _of_transfers(old: Program, new: Program) -> Iterator[Difference]:
    """Collectives by axis and kind: their number, and the bytes that a rank sends."""
    each = [transfers(program) for program in (old, new)]
    unit = "a microbatch, all stages" if old.schedule or new.schedule else "a step"
    for axis, kind in sorted(each[0].keys() | each[1].keys()):
        texts = [_moved(found.get((axis, kind))) for found in each]
        yield from changed("transfers", f"{kind} over {axis}, {unit}", *texts)
    each_sent = [message_bytes(program) for program in (old, new)]
    sent = [NONE if num is None else amount(num, "B") for num in each_sent]
    yield from changed("transfers", "messages between stages, a microbatch", *sent)


def _moved(found: tuple[int, int] | None) -> str:
    return NONE if found is None else f"{found[0]}, {amount(found[1], 'B')}"


def _of_memory(old: Program, new: Program) -> Iterator[Difference]:
    """The memory at the peak, of a pipeline for each rank too."""
    each = [peaks(program) for program in (old, new)]
    for who in dict.fromkeys([*each[0], *each[1]]):
        yield from _grown("memory", f"peak of {who}", each[0].get(who), each[1].get(who), "B")


def _of_time(old: Program, new: Program) -> Iterator[Difference]:
    """The predicted seconds of a step, of its phases, and of what is not hidden of each axis."""
    each = [seconds(program) for program in (old, new)]
    for what in dict.fromkeys([*each[0], *each[1]]):
        yield from _grown("time", what, each[0].get(what), each[1].get(what), "s")


def _grown(
    topic: str, what: str, old: float | None, new: float | None, unit: str
) -> Iterator[Difference]:
    """A number that differs, with how much more or less it is."""
    if old == new:
        return
    texts = [number_text(each, unit) for each in (old, new)]
    more = f" ({new / old - 1:+.1%})" if old and new else ""
    yield Difference(topic, what, texts[0], texts[1] + more)


def number_text(number: float | None, unit: str) -> str:
    """Seconds or bytes as text; ``none`` for None."""
    if number is None:
        return NONE
    return time_text(number) if unit == "s" else amount(int(number), unit)


# text -------------------------------------------------------------------------------------------
def _of_roles(old: Program, new: Program) -> Iterator[Difference]:
    """Which ranks run which file, and how many lines of each file's functions differ."""
    yield from changed(ROLES, "files", _roles(old), _roles(new))
    before, after = _files(old), _files(new)
    for name in sorted(before.keys() & after.keys()):
        found = _changed_lines(before[name], after[name])
        for part, (gone, added) in found.items():
            yield Difference(
                ROLES, f"{name}, {part}: {counted(gone, 'line')} gone, {added} new", "", ""
            )
    for name in sorted(before.keys() ^ after.keys()):
        which = "gone" if name in before else "new"
        num = len({**before, **after}[name].splitlines())
        yield Difference(ROLES, f"{name} is {which}, {counted(num, 'line')}", "", "")


def _files(program: Program) -> dict[str, str]:
    """The texts that ranks run: those of the roles, and the user's own functions."""
    return {**program.sources, **({HOOKS: program.hooks} if program.hooks else {})}


def _roles(program: Program) -> str:
    texts, first = [], 0
    for num, name in program.roles:
        last = f" to {first + num - 1}" if num > 1 else ""
        texts.append(f"{name} on rank{'s' * (num > 1)} {first}{last}")
        first += num
    return ", ".join(texts)


def _changed_lines(old: str, new: str) -> dict[str, tuple[int, int]]:
    """By function: how many of its lines are gone, and how many are new."""
    before, after = old.splitlines(), new.splitlines()
    parts = [_parts(text) for text in (old, new)]
    gone: Counter[str] = Counter()
    added: Counter[str] = Counter()
    for tag, start, end, first, last in line_changes(before, after):
        if tag != "equal":
            gone.update(parts[0].get(line + 1, "head") for line in range(start, end))
            added.update(parts[1].get(line + 1, "head") for line in range(first, last))
    return {part: (gone[part], added[part]) for part in dict.fromkeys([*gone, *added])}


def _parts(text: str) -> dict[int, str]:
    """The function, or the class and method, in which each line stands."""
    found: dict[int, str] = {}
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError):
        return found
    for node in (n for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef)):
        methods = [n for n in node.body if isinstance(n, ast.FunctionDef)]
        inner = {f"{node.name}.{n.name}": n for n in methods} if type(node) is ast.ClassDef else {}
        for name, each in {node.name: node, **inner}.items():
            found |= dict.fromkeys(range(each.lineno, (each.end_lineno or each.lineno) + 1), name)
    return found
