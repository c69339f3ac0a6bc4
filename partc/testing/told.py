"""What differs between a pinned program and another one, as the lines of a test's failure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial

from partc.amounts import amount, time_text
from partc.errors import LoadError, UsageError
from partc.file_text import Unreadable
from partc.program import PLAN
from partc.program.helper_file import NAME as HELPERS
from partc.reports.changes import NONE, plan_changes, unified
from partc.testing.pin import GRAPH, Pin
from partc.testing.stale import first_lines
from partc.wrong_calls import quoted

LAST = (HELPERS, GRAPH)  # behind the files of roles


@dataclass(frozen=True)
class Bounds:
    """By which share the numbers of a program may grow: 0.05 for 5 %; None: by any."""

    step: float | None
    peak: float | None
    sent: float | None

    def __post_init__(self) -> None:
        for each in fields(self):
            bound = getattr(self, each.name)
            is_number = isinstance(bound, int | float) and not isinstance(bound, bool)
            if bound is not None and not (is_number and 0 <= bound < math.inf):
                raise UsageError(
                    where=f"partc_golden({each.name}={quoted(bound)})",
                    what="that is no share by which a number may grow",
                    why="0.05 stands for 5 %", do="Give a number of 0 or more, or None for any.",
                )  # fmt: skip


@dataclass(frozen=True)
class Told:
    """What is said of a program: ``lines`` is empty if nothing differs."""

    lines: tuple[str, ...] = ()
    other_versions: str = ""

    def __iter__(self) -> Iterator[str]:
        yield from ([self.other_versions] if self.other_versions else [])
        yield from self.lines


def told(old: Pin | Unreadable, new: Pin, bounds: Bounds, place: str) -> Told:
    """Compare a program with what is pinned; ``place`` is the name of the pinned one's folder."""
    if isinstance(old, Unreadable):
        return Told((f"nothing to compare with: {old}",))
    too_large, costs = _costs(old, new, bounds)
    if old.texts == new.texts and not too_large:
        return Told((), _other_versions(old, new))
    rows = [*_rows("plan", _plan(old, new)), *_rows("cost", costs)]
    diff = first_lines([*_diff(old, new, place)]) or _rows("program", ["no line differs"])
    return Told((*rows, *diff), _other_versions(old, new))


def _rows(topic: str, texts: Sequence[str]) -> list[str]:
    return [f"{topic if i == 0 else '':<10} {text}" for i, text in enumerate(texts)]


def _other_versions(old: Pin, new: Pin) -> str:
    """Which versions are others, if any are."""
    both = old.versions.keys() & new.versions.keys()
    names = [
        name for name in new.versions if name in both and old.versions[name] != new.versions[name]
    ]
    if not names:
        return ""
    was, now = (", ".join(f"{n} {pin.versions[n]}" for n in names) for pin in (old, new))
    return f"pinned with {was}; this is {now}"


def _plan(old: Pin, new: Pin) -> list[str]:
    if rows := _keys(old, new):
        return rows
    same = old.texts.get(PLAN) == new.texts[PLAN]
    return ["no key differs" if same else "no key differs, but comments do"]


def _keys(old: Pin, new: Pin) -> list[str]:
    """The keys of the plan that differ, or why that of the pinned one cannot be read."""
    try:
        return [str(row) for row in plan_changes(old.texts.get(PLAN, ""), new.texts[PLAN])]
    except LoadError as error:
        return [str(error)]


def _costs(old: Pin, new: Pin, bounds: Bounds) -> tuple[bool, list[str]]:
    """Whether a number has grown too much; and a line for each number."""
    sizes = partial(amount, unit="B")
    rows = [
        _grown("step", old.step_s, new.step_s, bounds.step, time_text),
        _grown("peak", old.peak_bytes, new.peak_bytes, bounds.peak, lambda num: sizes(int(num))),
    ]
    for axis in dict.fromkeys([*old.sent_bytes, *new.sent_bytes]):
        sent = old.sent_bytes.get(axis), new.sent_bytes.get(axis)
        rows.append(_grown(f"bytes over {axis}", *sent, bounds.sent, lambda num: sizes(int(num))))
    return any(large for large, _ in rows), [text for _, text in rows]


def _grown(
    what: str, old: float | None, new: float | None, bound: float | None,
    text: Callable[[float], str],
) -> tuple[bool, str]:  # fmt: skip
    """Whether a number has grown by more than a share, and what is said of it."""
    was, now = (NONE if each is None else text(each) for each in (old, new))
    if old == new:
        return False, f"{what}: {now}, as pinned"
    large = bound is not None and (new or 0) > (old or 0) * (1 + bound)
    said = [f"{new / old - 1:+.1%}"] if old and new is not None else []
    said += [f"more than the {100 * (bound or 0):+.3g}% that the test allows"] if large else []
    why = f" ({', '.join(said)})" if said else ""
    return large, f"{what}: {was} -> {now}{why}"


def _diff(old: Pin, new: Pin, place: str) -> Iterator[str]:
    """The lines that differ; of roles first, of the plan where no key does."""
    hidden = {PLAN} if _keys(old, new) else set()
    names = {*old.texts, *new.texts} - hidden
    for name in sorted(names, key=lambda name: (name.endswith(LAST), name)):
        before, after = old.texts.get(name, ""), new.texts.get(name, "")
        if before != after:
            yield from unified(name, before, after, (place, "now"), context=1)
