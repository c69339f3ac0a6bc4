"""A text makes the calls that were checked: none lost, none twice, none before what it reads."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from partc.codegen.bodies.outline import outlined
from partc.codegen.bodies.printed_order import MEMBERS, check_printed
from partc.codegen.calls.tidy import spelled
from partc.codegen.helpers.needed import Helpers
from partc.codegen.repeats.arranged import arranged
from partc.codegen.repeats.runs import Item
from partc.errors import CheckError
from partc.graph import Graph
from partc.graph.graph_edits import copied
from tests.codegen.emitted import planned, traced
from tests.codegen.test_outline import network


def printed() -> tuple[Graph, list[Item]]:
    """A checked graph, and the items of its text, with calls of functions among them."""
    graph = spelled(planned(traced(*network()), "dp=2", "ddp"), fused=False)
    items, _ = arranged(graph)
    checked = copied(graph)
    helpers = Helpers()
    [items] = outlined([(graph, items)], helpers)
    assert helpers.outlined
    return checked, items


def of_a_function(items: list[Item]) -> int:
    """Where the first call of a function stands."""
    return next(i for i, item in enumerate(items) if MEMBERS in getattr(item, "meta", {}))


def without(items: list[Item], at: int) -> list[Item]:
    return [*items[:at], *items[at + 1 :]]


WRONG: dict[str, tuple[Callable[[list[Item]], list[Item]], str]] = {
    "function lost": (lambda items: without(items, of_a_function(items)), "before"),
    "last one lost": (lambda items: items[:-1], "not be printed"),
    "twice": (lambda items: [*items, items[2]], "twice"),
    "last one first": (lambda items: [items[-1], *items[:-1]], "before"),
    "function first": (lambda items: [items[of_a_function(items)], *items], "before"),
}


def test_what_is_printed_is_what_was_checked() -> None:
    check_printed(*printed())


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", WRONG)
def test_another_order_is_refused(how: str) -> None:
    checked, items = printed()
    change, says = WRONG[how]
    with pytest.raises(CheckError, match=says):
        check_printed(checked, change(items))
