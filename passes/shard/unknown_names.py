"""Entries of a plan whose names fit nothing in the model, such as a misspelt one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from partc.errors import PlanError
from partc.graph import Graph
from partc.passes.shard.value_names import value_names
from partc.plan import Plan, fits

_MOST = 5  # names of the model that an error lists
_SLOW = re.compile(r"\)[*+{]|([*+{].*){4}")  # regular expressions that may not come to an end
_FOLLOWS = "Drop the entry: how a buffer lies follows from the calls that read and write it."


def check_names(plan: Plan, graph: Graph) -> None:
    """PlanError for a name in the plan that fits nothing in the model."""
    for kind, table, names in named(plan, graph):
        for pattern in table:
            if not any(fits(pattern, n) for n in names):
                raise _refusal(kind, pattern, names, [*graph.buffers])


def named(plan: Plan, graph: Graph) -> Iterator[tuple[str, Mapping[str, Any], list[str]]]:
    """Each table of a plan: of what, its entries, and the names that the model has."""
    params = [*graph.params, *graph.aliases]
    calls = [*value_names(graph).values(), *params] if plan.values else []
    yield "parameter", plan.params, params
    yield "input", plan.inputs, [*graph.inputs]
    yield "value", plan.values, calls


def _refusal(kind: str, pattern: str, names: list[str], buffers: list[str]) -> PlanError:
    what, do = f"the model has no such {kind}", "Correct the name, or drop the entry."
    near = _calls_at(pattern, names) if kind == "value" else _near(pattern, names)
    why = f"it has {', '.join(near)}"
    if kind == "value":
        do = "A name is a module's path, a colon and an op: write one of these, or drop the entry."
    if kind == "parameter" and any(fits(pattern, each) for each in buffers):
        what, why, do = "it is a buffer", "[params] says where parameters are cut", _FOLLOWS
    if longer := _longer(pattern, names):
        why += "; between dots * stands for one part of a name"
        do = f"Write '{longer}', or drop the entry."
    elif globs := _globs_of(pattern, names):
        why = "patterns are no regular expressions: between dots * stands for one part of a name"
        do = f"Write {' and '.join(map(repr, globs))}, or drop the entry."
    return PlanError(where=f"plan, {pattern!r}", what=what, why=why, do=do)


def _longer(pattern: str, names: Sequence[str]) -> str:
    """The pattern with as many ``*`` between dots as a name has parts there; "" where none would do
    with one ``*`` for several parts.
    """
    parts = re.split(r"([.:])", pattern)
    whole = "".join("([^:]+)" if part == "*" else re.escape(part) for part in parts)
    found = next((m for name in names if (m := re.fullmatch(whole, name))), None)
    if found is None or "*" not in parts:
        return ""
    stars = iter([".".join("*" * len(each.split("."))) for each in found.groups()])
    return "".join(next(stars) if part == "*" else part for part in parts)


def _globs_of(pattern: str, names: Sequence[str]) -> list[str]:
    """The entries for what a regular expression finds, equal layers once if it finds them all; []
    if it finds none, or may be one that takes for ever.
    """
    if _SLOW.search(pattern):
        return []
    try:
        found = [name for name in names if re.fullmatch(pattern, name)]
    except re.error:
        return []
    globs = {each: re.sub(r"(?<=\.)\d+(?=[.:])", "*", each) for each in found}
    narrow = {g for g in globs.values() if any(fits(g, n) and n not in globs for n in names)}
    entries = (each if glob in narrow else glob for each, glob in globs.items())
    return [*dict.fromkeys(entries)][:_MOST]


def _calls_at(pattern: str, names: list[str]) -> list[str]:
    """The calls of the modules that a pattern names and of those inside of them, a forward's first,
    equal layers once; names next to it where there are none.
    """
    path = pattern.partition(":")[0]
    there = [n for n in names if (p := n.partition(":")[0]) != n and _lies_in(p, path)]
    folded = [re.sub(r"(?<=\.)\d+(?=[.:])", "*", each) for each in there]
    each = sorted(dict.fromkeys(folded), key=lambda n: ":d_" in n)  # of a kind as they ran
    return each[:_MOST] or _near(pattern, names)


def _lies_in(path: str, pattern: str) -> bool:
    parts = path.split(".")
    return any(fits(pattern, ".".join(parts[:end])) for end in range(1, len(parts) + 1))


def _near(name: str, names: list[str]) -> list[str]:
    from difflib import get_close_matches

    return get_close_matches(name, names, n=_MOST, cutoff=0.3) or names[:_MOST]
