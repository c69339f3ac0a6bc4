"""Passes of a user's own package, between partc's own.

::

    @partc.graph_pass(after="insert_collectives", why="what it is for")
    def my_pass(graph: Graph, plan: Plan) -> Graph: ...

A package that is installed names its passes as entry points of the group ``partc.passes``: each is
loaded when the first model is compiled.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any, TypeVar

from partc.errors import PlanError, UsageError
from partc.installed import GROUPS, every, loaded
from partc.passes.runner import OTHERS, Pass, State, Table
from partc.plan import Plan
from partc.registry import is_again
from partc.wrong_calls import did_you_mean, known_arguments, quoted

LOG = logging.getLogger("partc")
GROUP = "partc.passes"
NAMESPACES = ("partc", "partc_passes", "partc-passes", "partc_pass", "partc-pass")  # of groups
PROOF = "check"  # from this pass on a graph stays as it was proved
Function = TypeVar("Function", bound=Callable[..., Any])
_OWN: dict[str, tuple[str, Pass]] = {}  # by name, with the name of the pass that it follows


@known_arguments
def graph_pass(*, after: str, why: str = "") -> Callable[[Function], Function]:
    """Make a function a pass of every compile, behind the pass ``after``.

    Args:
        after: the name of a pass that `partc passes` lists before `check`, or of another function
            with this decorator. Where two rows of the table bear the name, the function runs
            behind each; where a step does not take the pass, it does not take the function either.
            Functions that name the same pass run in the order in which they were registered.
        why: what the table says of it; without it the first line of the docstring.

    The function asks by the names of its parameters for ``graph`` (a ``partc.graph.Graph``),
    ``plan``, ``mesh`` or ``stages``. It returns what it changed: a Graph, a Plan, the list of the
    stages' graphs, or a dict of these by name; None if it changed the graph in place.

    Raises:
        UsageError: two functions have the same name; the same one of a notebook's cell that runs
            again replaces the older. Whether ``after`` exists is looked at when a model is
            compiled.

    Example::

        @partc.graph_pass(after="name_calls", why="mul takes less time than div")
        def multiply_by_powers(graph: Graph) -> None: ...
    """

    if not isinstance(after, str):
        raise UsageError(
            where="graph_pass(after=...)", what=f"it is {quoted(after)}",
            why="it is the name of one pass", do='Write after="insert_collectives".',
        )  # fmt: skip

    def add(function: Function) -> Function:
        if not hasattr(function, "__name__") or not callable(function):
            raise UsageError(
                where="graph_pass", what=f"the pass is {quoted(function)}",
                why="passes are functions, known by their names",
                do="Write a def, and @graph_pass(after=...) above it.",
            )  # fmt: skip
        row = Pass(function, "as before", why or _first_line(function), own=False, optional=True)
        if row.name in _OWN and not is_again(function, _OWN[row.name][1].run):
            raise _taken(row, _OWN[row.name][1])
        _OWN[row.name] = after, row
        return function

    return add


def _first_line(function: Callable[..., Any]) -> str:
    return (function.__doc__ or "").strip().partition("\n")[0]


def with_own(table: Sequence[Pass]) -> Table:
    """The table with the passes of users' packages behind those that they name.

    UsageError if one names a pass that does not exist or stands behind the proof, or has the name
    of one of partc's.
    """
    _load()
    known = {each.name: each for each in table}
    proved = [each.name for each in table].index(PROOF)
    for _, own in _OWN.values():
        if own.name in known:
            raise _taken(own, known[own.name])
    rows = tuple(
        mixed
        for number, each in enumerate(table)
        for mixed in (each, *(_following(each, each.name) if number < proved else ()))
    )
    placed = {each.name for each in rows}
    for after, own in _OWN.values():
        if own.name not in placed:
            raise _no_place(own, after, after in known, rows)
    return Table(rows)


def passes_noted(state: State) -> dict[str, tuple[str, ...]]:
    """What a plan says of passes that not every compile has: the fields of a ``Plan``."""
    left = (each for each in state.table.passes if each.name in state.table.left_out)
    others = state.made.get(OTHERS, {}).items()
    return {
        "other_passes": tuple(f"{name} ({where})" for name, where in others),
        "left_out": tuple(dict.fromkeys(each.name for each in left if each.when.holds(state))),
    }


def check_replay(plan: Plan, rows: Table) -> None:
    """PlanError if a plan was made with a pass that does not run here, or without one that does."""
    named = {each.name for each in rows.passes}
    running = named - rows.left_out
    for text in plan.other_passes:
        if text.partition(" ")[0] not in running:
            raise PlanError(
                where="plan",
                what=f"it was made with the pass {text}",
                why="no such pass runs here",
                do="Install or import its package, or delete the plan's line of passes of others.",
            )
    for name in plan.left_out:
        if name in running:
            raise PlanError(
                where="plan",
                what=f"it was made without the pass {name}",
                why="the pass runs here",
                do=f"Compile with disable=[{name!r}] (--disable), or delete the plan's line of "
                "passes that are left out.",
            )


def _following(row: Pass, name: str) -> Iterator[Pass]:
    """Users' passes behind the one of a name, and behind those; all run where ``row`` does."""
    for after, own in _OWN.values():
        if after == name:
            yield replace(own, out=row.out, when=row.when)
            yield from _following(row, own.name)


def _no_place(own: Pass, after: str, proved: bool, rows: Sequence[Pass]) -> UsageError:
    before = rows[: [each.name for each in rows].index(PROOF)]
    stands = "is the proof" if after == PROOF else f"runs behind {PROOF!r}"
    near = "" if proved else did_you_mean(after, dict.fromkeys(each.name for each in before))
    last = next(each.name for each in reversed(before) if each.on_graph)
    return UsageError(
        where=f"pass {own.name} ({own.where})",
        what=f"it cannot run behind {after!r}",
        why=f"what was proved stays as it is, and {after!r} {stands}" if proved
        else f"no pass that runs has the name {after!r}",
        do=near or f"Name a pass that `partc passes` lists before {PROOF!r}, the last of them "
        f"{last!r}.",
    )  # fmt: skip


def _taken(own: Pass, other: Pass) -> UsageError:
    return UsageError(
        where=f"pass {own.name} ({own.where})",
        what="its name is taken",
        why=f"a pass of {other.where} has it, and passes are known by name",
        do="Rename the function.",
    )


@cache
def _load() -> None:
    """Import what installed packages name, once."""
    found = every()
    for group in sorted(found.groups):
        if group.split(".")[0] in NAMESPACES and group not in GROUPS:
            LOG.warning(
                "partc: %s of the entry points %r is not loaded: passes are entry points of the "
                "group %r",
                ", ".join(each.name for each in found.select(group=group)), group, GROUP,
            )  # fmt: skip
    for entry in found.select(group=GROUP):
        _load_one(entry)


def _load_one(entry: EntryPoint) -> None:
    before = len(_OWN)
    named = loaded(entry, GROUP, "pass")
    why = _no_pass(named, loads_some=len(_OWN) > before)
    if why:
        raise UsageError(
            where=f"pass {entry.name}",
            what=f"{entry.value!r} is no pass",
            why=why,
            do="Write @partc.graph_pass(after=...) above the function, or name in the group "
            f"{GROUP!r} a function that has it.",
        )


def _no_pass(named: Any, loads_some: bool) -> str:
    """Why what an entry point names makes no pass; "" for a pass, and a package that has one."""
    passes = [own.run for _, own in _OWN.values()]
    if isinstance(named, ModuleType):
        package = named.__name__.partition(".")[0]
        has = any(each.__module__.partition(".")[0] == package for each in passes)
        return "" if has or loads_some else f"no function of the module {named.__name__} is one"
    if any(inspect.unwrap(named) is inspect.unwrap(each) for each in passes if callable(named)):
        return ""
    if not inspect.isfunction(named):
        return f"it is {quoted(named)}, and passes are functions"
    made = f"the function {named.__name__} of {named.__module__}"
    return f"{made} is not registered: @partc.graph_pass(after=...) does not stand above it"
