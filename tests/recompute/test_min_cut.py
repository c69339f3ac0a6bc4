"""Minimum cuts: as narrow as any, and of equal ones that next to the sink."""

from __future__ import annotations

import itertools
import random

import pytest

from partc.passes.recompute.min_cut import Edges, sink_side


def test_of_equal_cuts_the_one_next_to_the_sink() -> None:
    assert sink_side({("s", "a"): 5, ("a", "b"): 3, ("b", "t"): 3}, "s", "t") == {"t"}


def test_what_is_not_connected_is_not_cut() -> None:
    assert sink_side({("s", "a"): 1, ("b", "t"): 1}, "s", "t") == {"b", "t"}
    assert sink_side({("s", "a"): 1}, "s", "t") == {"t"}


@pytest.mark.parametrize("seed", range(20))
def test_no_cut_is_narrower_and_none_as_narrow_is_nearer(seed: int) -> None:
    draw = random.Random(seed)
    inner = "abcd"
    edges: Edges = {
        (a, b): draw.randint(1, 3)
        for a, b in itertools.permutations(("s", *inner, "t"), 2)
        if a != "t" and b != "s" and draw.random() < 0.5
    }
    sides = [
        {"t", *some} for num in range(5) for some in itertools.combinations(inner, num)
    ]  # the smallest first
    least = min(_width(edges, side) for side in sides)
    nearest = next(side for side in sides if _width(edges, side) == least)
    assert sink_side(edges, "s", "t") == nearest


def _width(edges: Edges, side: set[str]) -> int:
    return sum(width for (a, b), width in edges.items() if a not in side and b in side)
