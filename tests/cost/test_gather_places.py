"""Where the gathers of following runs start in a prediction, as lines of a program have them."""

from __future__ import annotations

import pytest

from partc.cost.gather_places import Begun, gather_places
from partc.cost.step_events import CALL, Call, Event, Execution, Run

CALLS = (Call("aten.mm", "matmul", "f32", 100, 8), Call("aten.add", "matmul", "f32", 1, 8))
PRODUCT, SUM = (Event("F", CALL, number) for number in (0, 1))


def ran(label: str, *events: Event, backward: bool = False) -> Execution:
    return Execution(label, Run((), events, backward))


def places(*runs: Execution, prefetch: int = 1) -> list[Begun]:
    return [*gather_places(runs, CALLS, prefetch)]


def block(label: str, *, backward: bool = False) -> Execution:
    return ran(label, PRODUCT, SUM, backward=backward)


def test_a_block_gathers_for_the_next_of_its_loop() -> None:
    found = places(*(block(f"layers.{i}") for i in range(3)))
    assert [each.first for each in found] == [2, 3, 4]


def test_a_loop_right_behind_a_loop_begins_by_itself() -> None:
    forward = [block(f"layers.{i}") for i in range(2)]
    backward = [block(f"layers.{i}", backward=True) for i in (1, 0)]
    assert [each.first for each in places(*forward, *backward)] == [2, 2, 4, 5]


@pytest.mark.parametrize(("prefetch", "place", "then"), [(1, 2, 4), (2, 0, 5)])
def test_between_loops_as_late_as_what_follows_hides_it(
    prefetch: int, place: int, then: int
) -> None:
    """The last product hides the gather of one block, which has one too, and all hide two."""
    forward = [block(f"layers.{i}") for i in range(2)]
    backward = [block(f"layers.{i}", backward=True) for i in (1, 0)]
    head = ran("", SUM, PRODUCT, PRODUCT, SUM)
    found = places(*forward, head, *backward, prefetch=prefetch)
    assert found[1].first == 3  # what the calls between begin with is gathered in the last block
    assert found[2] == Begun(3, place, then)


def test_in_front_of_the_first_loop_one_block_is_gathered() -> None:
    found = places(ran("", SUM), block("layers.0"), block("layers.1"), prefetch=2)
    assert found[0] == Begun(1, 0, 2)


def test_a_single_block_is_gathered_with_the_block_before() -> None:
    found = places(block("downs.0"), ran("", SUM), block("ups.0"), ran("", SUM), block("heads.0"))
    assert [each.first for each in found] == [3, 3, 5, 5, 6]
    assert [each.then for each in found] == [3, 3, 5, 5, 6]


def test_behind_a_scripts_loss_nothing_starts_before_it() -> None:
    """The calls behind the place where a step waits are a run by themselves."""
    runs = (block("layers.0"), block("layers.1"), ran("", SUM), ran("", PRODUCT, PRODUCT, SUM))
    found = places(*runs, block("layers.1", backward=True), block("layers.0", backward=True))
    assert found[2] == Begun(3, 0, 3)
    assert found[3] == Begun(4, 1, 5)
