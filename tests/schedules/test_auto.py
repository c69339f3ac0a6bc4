"""The schedule made from costs is never worse than a named one, fits its memory, is repeatable."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence

import pytest

from partc.errors import PlanError
from partc.schedules import NAMES, Schedule, make
from partc.schedules.actions import Action, check_schedule, looped, v_shaped
from partc.schedules.auto import POLICIES, auto, least_cap
from partc.schedules.improve import improve, merge_whole_backwards
from partc.schedules.list_order import Policy, list_schedule
from partc.schedules.timing import Costs, Timeline, timeline


def named(costs: Costs, rank_of: tuple[int, ...], microbatches: int) -> Iterator[Timeline]:
    """Every named schedule that trains with this placement."""
    ranks = max(rank_of) + 1
    for name in NAMES:
        try:
            schedule = make(
                name, ranks=ranks, microbatches=microbatches, chunks=len(rank_of) // ranks
            )
        except PlanError:
            continue
        if schedule.rank_of == rank_of and name != "forward-only":
            yield timeline(schedule, costs)


def shortest_named(costs: Costs, rank_of: tuple[int, ...], microbatches: int, cap: float) -> float:
    runs = named(costs, rank_of, microbatches)
    return min((run.makespan for run in runs if max(run.peaks) <= cap), default=float("inf"))


def random_costs(seed: int, stages: int) -> Costs:
    """Uneven in everything, with whole numbers, so that times compare exactly."""
    draw = random.Random(seed).randint

    def row(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(low, high) for _ in range(stages))

    held = row(2, 4)
    waiting = tuple(draw(0, most) for most in held)
    return Costs(row(8, 12), row(6, 14), row(0, 12), row(0, 3), held, waiting)


PLACEMENTS = [looped(1, 1), looped(4, 1), looped(2, 2), v_shaped(3), looped(3, 4)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("rank_of", PLACEMENTS)
@pytest.mark.parametrize("microbatches", [1, 5, 8])
def test_never_worse_than_a_named_one_and_within_the_cap(
    rank_of: tuple[int, ...], microbatches: int
) -> None:
    for seed in range(4):
        costs = random_costs(seed, len(rank_of))
        least = max(least_cap(costs, rank_of))
        for cap in (least, 1.5 * least, 3 * least, 100 * least):
            schedule = auto(
                costs, ranks=max(rank_of) + 1, microbatches=microbatches, rank_of=rank_of,
                memory_cap=cap, evaluations=30,
            )  # fmt: skip
            check_schedule(schedule)
            run = timeline(schedule, costs)
            assert schedule.rank_of == rank_of
            assert max(run.peaks) <= cap
            assert run.makespan <= shortest_named(costs, rank_of, microbatches, cap)


@pytest.mark.exhaustive
def test_strictly_better_where_stages_and_passes_are_unequal() -> None:
    better = 0
    for seed in range(10):
        costs = random_costs(seed, 8)
        cap = 2 * max(least_cap(costs, looped(4, 2)))
        run = timeline(auto(costs, ranks=4, microbatches=8, memory_cap=cap, evaluations=100), costs)
        placements = (looped(4, 2), v_shaped(4))
        best_named = min(shortest_named(costs, placed, 8, cap) for placed in placements)
        assert run.makespan <= best_named
        better += run.makespan < best_named
    assert better >= 9


def test_a_heavy_last_stage_and_cheap_weight_gradients() -> None:
    """One F, I and W that take their own times: 1F1B and the zero-bubble orders leave bubbles."""
    costs = Costs((10, 10, 10, 16), (14, 14, 14, 22), (6, 6, 6, 10), (1,) * 4, (1,) * 4, (1,) * 4)
    run = timeline(auto(costs, ranks=4, microbatches=8, memory_cap=6), costs)
    assert run.makespan < shortest_named(costs, looped(4, 1), 8, 6)


@pytest.mark.parametrize("rank_of", [looped(1, 1), looped(2, 1), v_shaped(2), looped(3, 2)])
@pytest.mark.parametrize("policy", [Policy(), *POLICIES[:5], Policy(split=False, age=0)])
def test_no_policy_runs_out_of_memory_half_way(rank_of: tuple[int, ...], policy: Policy) -> None:
    """At and a little above the least cap most forwards have to wait."""
    for seed in range(5):
        costs = random_costs(seed, len(rank_of))
        needs = least_cap(costs, rank_of)
        for slack in (0, 1, 3, 5):
            caps = [need + slack for need in needs]
            schedule = list_schedule(costs, rank_of, 6, caps, policy)
            check_schedule(schedule)
            peaks = timeline(schedule, costs).peaks
            assert all(peak <= cap for peak, cap in zip(peaks, caps, strict=True))


def test_too_small_a_cap_says_the_least_that_works() -> None:
    costs = Costs.even(8, activation=1_234_567)
    with pytest.raises(PlanError) as caught:
        auto(costs, ranks=4, microbatches=6, memory_cap=2_000_000)
    error = caught.value
    assert all((error.where, error.what, error.why, error.do))
    assert error.what == (
        "no order fits a memory cap of 2,000,000; the least that works is 2,469,134"
    )
    found = re.search(r"least that works is ([\d,]+)", error.what)
    assert found
    least = int(found[1].replace(",", ""))
    run = timeline(auto(costs, ranks=4, microbatches=6, memory_cap=least), costs)
    assert max(run.peaks) == least
    with pytest.raises(PlanError):
        auto(costs, ranks=4, microbatches=6, memory_cap=least - 1)


def test_each_rank_may_have_a_cap_of_its_own() -> None:
    costs, caps = Costs.even(4), [4, 2, 1, 1]
    run = timeline(auto(costs, ranks=4, microbatches=8, memory_cap=caps), costs)
    assert all(peak <= cap for peak, cap in zip(run.peaks, caps, strict=True))
    with pytest.raises(PlanError, match="pipeline rank 2: no order fits a memory cap of 0"):
        auto(costs, ranks=4, microbatches=8, memory_cap=[4, 2, 0, 1])


def test_memory_that_is_no_whole_number() -> None:
    """Sums of tenths are not exact; a cap of just as much must still be enough."""
    costs = Costs.even(4, activation=0.1, waiting=0.1)
    run = timeline(auto(costs, ranks=2, microbatches=9, memory_cap=0.2), costs)
    assert max(run.peaks) == pytest.approx(0.2)


def test_stages_that_cannot_be_dealt_out() -> None:
    with pytest.raises(PlanError, match="5 stages cannot be dealt out evenly"):
        auto(Costs.even(5), ranks=2, microbatches=4)


def test_a_backward_is_split_only_where_that_helps() -> None:
    alone = auto(Costs.even(1), ranks=1, microbatches=5)
    assert alone.kinds == {"F", "B"}
    piped = auto(Costs.even(4), ranks=4, microbatches=8)
    assert {"I", "W"} <= piped.kinds
    grows = auto(Costs.even(4, activation=1, waiting=9), ranks=4, microbatches=8, memory_cap=4)
    assert grows.kinds == {"F", "B"}  # what would wait for W does not fit


def every_order(schedule: Schedule) -> Iterator[tuple[tuple[Action, ...], ...]]:
    """All orders of two ranks in which microbatches pass every stage in their order."""

    def orders(left: Sequence[tuple[Action, ...]]) -> Iterator[tuple[Action, ...]]:
        if not any(left):
            yield ()
        for at, queue in enumerate(left):
            if queue:
                rest = [*left[:at], queue[1:], *left[at + 1 :]]
                yield from ((queue[0], *tail) for tail in orders(rest))

    queues = [
        [
            tuple(Action(s, kind, i) for i in range(schedule.microbatches))  # type: ignore[arg-type]
            for s in schedule.stages_of(rank)
            for kind in "FIW"
        ]
        for rank in range(2)
    ]
    for first in orders(queues[0]):
        for second in orders(queues[1]):
            yield first, second


@pytest.mark.exhaustive
def test_small_cases_are_optimal() -> None:
    """Against every order there is of two ranks, one stage each and two microbatches."""
    for seed in range(6):
        costs = random_costs(seed, 2)
        schedule = auto(costs, ranks=2, microbatches=2)
        best = float("inf")
        for orders in every_order(schedule):
            try:
                run = timeline(Schedule("any", orders, (0, 1), 2), costs)
            except PlanError:
                continue
            best = min(best, run.makespan)
        assert timeline(schedule, costs).makespan == best


def test_improving_shortens_1f1b_and_keeps_the_cap() -> None:
    costs = Costs.even(4, forward=10, input_grad=11, weight_grad=9)
    split = timeline(
        list_schedule(costs, looped(4, 1), 8, [4] * 4, Policy(fill=False, age=1e6)), costs
    )
    better = improve(split, [4] * 4, 500)
    assert better.makespan < split.makespan
    assert max(better.peaks) <= 4
    check_schedule(better.schedule)


def test_merging_moves_nothing() -> None:
    seeds_with_merges = 0
    for seed in range(10):
        costs = random_costs(seed, 6)
        split = timeline(list_schedule(costs, v_shaped(3), 7, [40.0] * 3, Policy()), costs)
        merged = timeline(merge_whole_backwards(split), costs)
        check_schedule(merged.schedule)
        assert merged.makespan == split.makespan
        assert merged.busy == split.busy
        assert all(a <= b for a, b in zip(merged.peaks, split.peaks, strict=True))
        seeds_with_merges += "B" in merged.schedule.kinds
    assert seeds_with_merges > 5


@pytest.mark.exhaustive
def test_the_same_number_of_evaluations_gives_the_same_and_more_help() -> None:
    lengths = []
    for seed in range(5):
        costs = random_costs(seed, 8)
        cap = 2 * max(least_cap(costs, looped(4, 2)))
        schedules = [
            auto(costs, ranks=4, microbatches=8, memory_cap=cap, evaluations=n)
            for n in (1, 40, 40, 400)
        ]
        assert schedules[1] == schedules[2]
        lengths.append([timeline(schedule, costs).makespan for schedule in schedules])
    few, some, _, many = map(sum, zip(*lengths, strict=True))
    assert few > some > many
