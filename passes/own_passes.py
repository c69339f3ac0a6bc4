"""Passes of a user's own package, between partc's own.

::

    @partc.graph_pass(after="insert_collectives", why="what it is for")
    def my_pass(graph: Graph, plan: Plan) -> Graph: ...

A package that is installed names its passes as entry points of the group ``partc.passes``: each is
loaded when the first model is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import entry_points
from typing import Any, TypeVar

from partc.passes.runner import Pass, Table
from partc.registry import Registry

GROUP = "partc.passes"
Function = TypeVar("Function", bound=Callable[..., Any])
_OWN: Registry[tuple[str, Pass]] = Registry("pass")  # with the name of the pass that it follows


def graph_pass(*, after: str, why: str = "") -> Callable[[Function], Function]:
    """A decorator that lets a function run behind the pass ``after``, in every compile.

    The function asks by the names of its parameters for ``graph`` (a ``partc.graph.Graph``),
    ``plan`` and ``mesh``, and returns the Graph, or None if it changed it in place. Where two rows
    of the table bear the name ``after``, it runs behind each. UsageError if two functions have the
    same name; that ``after`` exists is looked at when a model is compiled.
    """

    def add(function: Function) -> Function:
        row = Pass(function, "as before", why or _first_line(function), own=False, optional=True)
        _OWN.add(row.name, (after, row))
        return function

    return add


def _first_line(function: Callable[..., Any]) -> str:
    return (function.__doc__ or "").strip().partition("\n")[0]


def with_own(table: Sequence[Pass]) -> Table:
    """The table with the passes of users' packages behind those that they name; UsageError if one
    names none.
    """
    _load()
    rows = Table(tuple(table))
    for after, own in (_OWN[name] for name in _OWN):
        behind = {*rows.named(after)}
        mixed = []
        for row, each in enumerate(rows.passes):
            mixed += [each, replace(own, out=each.out)] if row in behind else [each]
        rows = Table(tuple(mixed))
    return rows


@cache
def _load() -> None:
    """Import what installed packages name, once."""
    for entry in entry_points(group=GROUP):
        entry.load()
