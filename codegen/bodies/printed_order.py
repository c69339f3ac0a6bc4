"""Proves that the calls of a text are those of the graph that was checked, each once and in order.

Before a text is printed its calls are put in another order (equal blocks become loops) and replaced
(by calls of functions). Neither may lose a call, make one twice, or read what is not there yet.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

from torch import fx

from partc.codegen.repeats.runs import Item, Loop
from partc.errors import CheckError
from partc.graph import Graph
from partc.rules.table import name_of

MEMBERS = "members"  # of a node's meta: the names of the calls that a function's call makes


def members(node: fx.Node) -> tuple[str, ...]:
    """The names of the checked graph's calls that a call makes, in the order in which it does.

    A call that picks one result of a function's call makes none, also where another function's
    call stands for both of them.
    """
    of = node.args[0] if node.target is operator.getitem else None
    if isinstance(of, fx.Node) and MEMBERS in of.meta:
        return ()
    known: tuple[str, ...] = node.meta.get(MEMBERS, (node.name,))
    return known


def check_printed(checked: Graph, items: Sequence[Item]) -> None:
    """CheckError unless the items make the checked graph's calls, each behind what it reads."""
    calls = {node.name: node for node in checked.calls()}
    made: set[str] = set()
    for name in _made(items, calls):
        node = calls[name]
        for read in node.all_input_nodes:
            if read.name in calls and read.name not in made:
                raise _wrong(node, f"it would stand before {read.name}, which it reads")
        if name in made:
            raise _wrong(node, "it would be printed twice")
        made.add(name)
    for name, node in calls.items():
        if name not in made:
            raise _wrong(node, "it would not be printed")


def _made(items: Sequence[Item], calls: dict[str, fx.Node]) -> Iterator[str]:
    for item in items:
        groups = [group.nodes for group in item.groups] if isinstance(item, Loop) else [(item,)]
        for node in (node for nodes in groups for node in nodes):
            if MEMBERS in node.meta or node.name in calls:
                yield from members(node)


def _wrong(node: fx.Node, what: str) -> CheckError:
    return CheckError(
        where=f"{node.name}, {name_of(node.target)}",
        what=what,
        why="a program makes the calls that were checked, and in an order in which each finds "
        "what it reads",
        do="This is a fault of partc: report it with the model.",
    )
