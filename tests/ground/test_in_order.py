"""What needs each other comes in the order of needs, then of places."""

from __future__ import annotations

import random

import networkx
import pytest

from partc.in_order import in_order


@pytest.mark.parametrize("seed", range(20))
def test_order_is_the_lexicographic_one(seed: int) -> None:
    draw = random.Random(seed)
    items = draw.sample(range(12), 12)
    needs = {item: draw.sample(items[:i], draw.randint(0, i // 2)) for i, item in enumerate(items)}
    graph = networkx.DiGraph([(need, item) for item in items for need in needs[item]])
    graph.add_nodes_from(items)
    places = draw.sample(range(12), 12)
    expected = networkx.lexicographical_topological_sort(graph, key=places.__getitem__)
    assert list(in_order(needs, places.__getitem__)) == list(expected)


def test_what_stands_in_a_circle_or_needs_it_never_comes() -> None:
    needs = {"a": ["c"], "b": ["a"], "c": ["b"], "d": ["c"], "e": [], "f": ["e"]}
    assert list(in_order(needs, "abcdfe".index)) == ["e", "f"]
