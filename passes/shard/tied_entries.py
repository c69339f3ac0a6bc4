"""Entries of a plan that name a tied parameter by its second name, as ``head.weight`` of an
embedding: they are of the one parameter, and two of one parameter cannot say different things.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from partc.errors import PlanError
from partc.graph import Graph
from partc.passes.shard.value_names import value_names
from partc.plan import Plan, fits


def by_first_name(plan: Plan, graph: Graph) -> Plan:
    """The same plan with entries of tied parameters under the name that the graph uses.

    PlanError where both names have an entry of their own, and these differ.
    """
    if not graph.aliases or not (plan.params or plan.values):
        return plan
    calls = [*value_names(graph).values()] if plan.values else []
    return plan.changed(
        params=_renamed(plan.params, graph.aliases, graph.params),
        values=_renamed(plan.values, graph.aliases, [*graph.params, *calls]),
    )


def _renamed(
    table: Mapping[str, Any], aliases: Mapping[str, str], others: Collection[str]
) -> dict[str, Any]:
    """A table with entries under first names; ``others``: all names that the graph uses.

    A pattern that fits more than the second name, as ``*.weight``, is not meant for it.
    """
    found, said = dict(table), {name: name for name in table}
    for second, first in aliases.items():
        pattern = _entry(table, second)
        if pattern is None or any(fits(pattern, name) for name in others):
            continue
        known = _entry(found, first)
        if known is not None and not fits(known, second) and found[known] != table[pattern]:
            raise _contradiction(said[known], pattern, first, second)
        if known is None or fits(known, second):
            found[first], said[first] = table[pattern], pattern
    seconds = {p for p in table if not any(fits(p, n) for n in others)}
    meant = {p for p in seconds if any(fits(p, second) for second in aliases)}
    return {pattern: entry for pattern, entry in found.items() if pattern not in meant}


def _entry(table: Mapping[str, Any], name: str) -> str | None:
    """The key of the entry for a name: the name itself, or else the first pattern that fits."""
    return name if name in table else next((each for each in table if fits(each, name)), None)


def _contradiction(one: str, other: str, first: str, second: str) -> PlanError:
    return PlanError(
        where=f"plan, {one!r} and {other!r}",
        what=f"they say different things of one parameter: {second} is tied to {first}",
        why="ranks hold a tied parameter once, under both its names",
        do=f"Leave one of them out; that of {first} is the one that a saved plan has.",
    )
