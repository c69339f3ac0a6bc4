"""Which variant a controller wants, by the numbers alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partc.control.decide import Rules, Standing, after, is_due, switched

RULES = Rules(("exact", "int8", "sparse"), gain=0.1, steps=3, stay=5)
SLOW = {"exact": 10.0, "int8": 4.0, "sparse": 3.9}  # int8 is about as fast, and preferred
FAST = {"exact": 1.0, "int8": 0.98, "sparse": 1.2}


def walk(standing: Standing, steps: Sequence[dict[str, float]], rules: Rules = RULES) -> list[str]:
    """The variants that run, step by step, if each takes what is predicted."""
    ran = []
    for predicted in steps:
        ran.append(standing.variant)
        standing = after(rules, standing, predicted[standing.variant], predicted)
        standing = switched(standing) if is_due(rules, standing) else standing
    return ran


def test_it_switches_where_links_become_slow_and_back() -> None:
    ran = walk(Standing("exact"), [FAST] * 6 + [SLOW] * 8 + [FAST] * 8)
    assert ran == ["exact"] * 9 + ["int8"] * 8 + ["exact"] * 5


def test_a_short_disturbance_changes_nothing() -> None:
    steps = [FAST] * 6 + [SLOW] * 2 + [FAST] * 6
    assert walk(Standing("exact"), steps) == ["exact"] * len(steps)


def test_so_many_steps_lie_between_two_switches() -> None:
    ran = walk(Standing("exact"), [FAST] * 5 + [SLOW, SLOW, SLOW, FAST, FAST, FAST] * 6)
    changes = [i for i in range(1, len(ran)) if ran[i] != ran[i - 1]]
    assert all(b - a >= RULES.stay for a, b in pairwise(changes))


@given(st.floats(1.0, 1.099), st.floats(1.0, 1.049))
def test_two_that_are_about_as_fast_do_not_take_turns(first: float, second: float) -> None:
    steps = [
        {"exact": first, "int8": 1.0, "sparse": 9.0},
        {"exact": 1.0, "int8": second, "sparse": 9.0},
    ]
    assert {*walk(Standing("exact"), steps * 20)} == {"exact"}


def test_of_those_within_the_budget_the_preferred_one_runs() -> None:
    rules = Rules(RULES.order, steps=1, stay=0, seconds=5.0)
    assert walk(Standing("sparse"), [SLOW] * 3, rules)[-1] == "int8"
    none = Rules(RULES.order, steps=1, stay=0, seconds=1.0)
    assert walk(Standing("exact"), [SLOW] * 3, none)[-1] == "int8"


def test_a_prediction_that_was_off_is_corrected() -> None:
    """int8 is predicted to be fast, and is not: after it ran, exact is the better one again."""
    rules, standing, ran = Rules(RULES.order, steps=2, stay=4), Standing("exact"), []
    took = {"exact": 10.0, "int8": 20.0, "sparse": 50.0}
    for _ in range(30):
        ran.append(standing.variant)
        predicted = {"exact": 10.0, "int8": 4.0, "sparse": 50.0}
        standing = after(rules, standing, took[standing.variant], predicted)
        standing = switched(standing) if is_due(rules, standing) else standing
    assert "int8" in ran
    assert ran[-10:] == ["exact"] * 10


@pytest.mark.parametrize("name", RULES.order)
def test_a_standing_is_read_as_it_was_written(name: str) -> None:
    standing = after(RULES, Standing(name), 5.0, SLOW)
    assert Standing.of_json(standing.as_json()) == standing
