"""Stages are cut as evenly as any cut could, within memory, and always at the same places."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from partc.errors import PlanError
from partc.passes.stages.cut_stages import Unit, balance
from partc.passes.stages.cut_virtual_stages import balance_ranks
from partc.schedules.actions import looped, v_shaped

Rank = tuple[float, int, float]  # slowest stage, bytes over boundaries, minus the fastest stage


def unit(
    name: str, forward: float, backward: float, state: int = 0, saved: int = 0, out: int = 0
) -> Unit:
    return Unit(name, forward, backward, state, saved, out)


def random_chain(seed: int) -> tuple[list[Unit], int]:
    draw = random.Random(seed).randint
    units = [
        unit(f"u{i}", draw(0, 4), draw(0, 6), draw(0, 9), draw(0, 3), draw(0, 4))
        for i in range(draw(1, 9))
    ]
    return units, draw(1, min(5, len(units)))


def exposed(num_bytes: int) -> float:
    """Not proportional, as with a latency; more than some units compute."""
    return 0.5 + num_bytes if num_bytes else 0.0


def every_cut(
    units: Sequence[Unit],
    stages: int,
    in_flight: Sequence[int],
    memory: int | None,
    there: Sequence[Sequence[Unit]] = (),
) -> Iterator[tuple[Rank, tuple[int, ...]]]:
    """All cuts that fit, each with what ``balance`` minimises; counted from the text, slowly."""
    for points in combinations(range(1, len(units)), stages - 1):
        times, fits = [], True
        for stage, (first, end) in enumerate(zip((0, *points), (*points, len(units)), strict=True)):
            part = units[first:end]
            front = exposed(units[first - 1].boundary_bytes) if first else 0
            back = exposed(part[-1].boundary_bytes) if end < len(units) else 0
            runs = there[stage][first:end] if there else part
            times.append(time_of(runs) + front + back)
            fits &= memory is None or held_by(part, in_flight[stage]) <= memory
        if fits:
            crossing = sum(units[p - 1].boundary_bytes for p in points)
            yield (max(times), crossing, -min(times)), points


@pytest.mark.exhaustive
@pytest.mark.parametrize("memory", [None, 20, 30, 45])
def test_as_good_as_trying_every_cut(memory: int | None) -> None:
    refused = 0
    for seed in range(300):
        units, stages = random_chain(seed)
        in_flight = [stages - s for s in range(stages)]
        cuts = {points: rank for rank, points in every_cut(units, stages, in_flight, memory)}
        try:
            points = balance(
                units, stages, in_flight=in_flight, memory_bytes=memory, exposed_us=exposed
            )
        except PlanError:
            refused += 1
            assert not cuts, seed
        else:
            assert cuts[tuple(points)] == min(cuts.values()), seed
    assert (memory is None) == (refused == 0)
    assert refused < 300


def test_says_the_least_memory_that_works() -> None:
    refused = 0
    for seed in range(100):
        units, stages = random_chain(seed)
        in_flight = [stages - s for s in range(stages)]
        try:
            balance(units, stages, in_flight=in_flight, memory_bytes=12)
        except PlanError as error:
            refused += 1
            found = re.search(r"the least that works is ([\d,]+) bytes", error.what)
            assert found
            needed = int(found[1].replace(",", ""))
            assert any(every_cut(units, stages, in_flight, needed))
            assert not any(every_cut(units, stages, in_flight, needed - 1))
    assert refused > 20


def test_message_names_who_holds_the_memory() -> None:
    units = [unit("embedding", 1, 1, 70), *(unit(f"block{i}", 1, 2, 10, 4) for i in range(4))]
    with pytest.raises(PlanError) as caught:
        balance(units, 2, in_flight=[2, 1], memory_bytes=50)
    assert str(caught.value) == (
        "pipeline of 2 stages: no cut fits 50 bytes of memory; the least that works is 70 bytes "
        "(stage 0 then holds, with 2 microbatches in flight, embedding 70). Cut the model finer "
        "(more pp or tp ranks, or shard optimizer state), make microbatches smaller, recompute "
        "activations, or take a schedule with fewer microbatches in flight."
    )


def test_stages_may_run_on_different_devices() -> None:
    for seed in range(200):
        units, stages = random_chain(seed)
        draw = random.Random(seed).randint
        kinds = [units, [replace(u, forward_us=draw(0, 8), backward_us=draw(0, 8)) for u in units]]
        there = [kinds[draw(0, 1)] for _ in range(stages)]
        in_flight = [stages - s for s in range(stages)]
        found = every_cut(units, stages, in_flight, None, there)
        cuts = {points: rank for rank, points in found}
        points = balance(units, stages, in_flight=in_flight, exposed_us=exposed, there=there)
        assert cuts[tuple(points)] == min(cuts.values()), seed


def test_ranks_on_slower_devices_get_less() -> None:
    units = [unit(f"block{i}", 1, 2) for i in range(18)]
    slow = [unit(f"block{i}", 2, 4) for i in range(18)]
    assert balance_ranks(units, [0, 1], in_flight=[2, 1], there=[units, slow]) == [12]
    points = balance_ranks(units, looped(2, 2), in_flight=[2] * 4, there=[units, slow])
    sizes = [end - first for first, end in pairwise([0, *points, 18])]
    assert (sizes[0] + sizes[2], sizes[1] + sizes[3]) == (12, 6)


def test_limits_may_differ_by_stage() -> None:
    units = [unit(f"block{i}", 1, 2, 10) for i in range(6)]
    assert balance(units, 2, in_flight=[2, 1], memory_bytes=[20, 40]) == [2]
    with pytest.raises(PlanError, match=r"no cut fits 40 bytes .* the least that works is 50"):
        balance(units, 2, in_flight=[2, 1], memory_bytes=[5, 40])


def test_more_stages_than_units() -> None:
    with pytest.raises(PlanError, match="the model has only 1 unit to cut between"):
        balance([unit("block", 1, 2)], 2, in_flight=[2, 1])


def llama(layers: int, head: float) -> list[Unit]:
    block = [unit(f"layers.{i}", 10, 20, 200, 30, 8) for i in range(layers)]
    return [unit("embedding", 1, 1, 500, 1, 8), *block, unit("head", head, 2 * head, 500, 20)]


def parts(units: Sequence[Unit], points: Sequence[int]) -> list[Sequence[Unit]]:
    """The units of every stage."""
    return [units[a:b] for a, b in zip((0, *points), (*points, len(units)), strict=True)]


def time_of(part: Sequence[Unit]) -> float:
    return sum(unit.forward_us + unit.backward_us for unit in part)


def held_by(part: Sequence[Unit], in_flight: int) -> int:
    return sum(unit.parameter_bytes + in_flight * unit.activation_bytes for unit in part)


def test_a_heavy_head_takes_layers_from_the_last_stage() -> None:
    units = llama(32, head=25)
    points = balance(units, 4, in_flight=[4, 3, 2, 1])
    stages = parts(units, points)
    assert [sum(u.name.startswith("layers") for u in part) for part in stages] == [8, 9, 9, 6]
    assert max(map(time_of, stages)) == 270


def test_activations_in_flight_take_layers_from_the_first_stage() -> None:
    units = llama(32, head=0)
    free = balance(units, 4, in_flight=[4, 3, 2, 1])
    tight = balance(units, 4, in_flight=[4, 3, 2, 1], memory_bytes=2600)
    assert max(map(held_by, parts(units, tight), [4, 3, 2, 1])) <= 2600
    assert tight[0] < free[0]


def test_long_chains_of_equal_units_are_cut_evenly() -> None:
    units = [unit(f"u{i}", 0.1, 0.2, 3, 2, 1) for i in range(2048)]
    in_flight = [64 - s for s in range(64)]
    assert balance(units, 64, in_flight=in_flight) == list(range(32, 2048, 32))


def slowest_rank(units: Sequence[Unit], points: Sequence[int], rank_of: Sequence[int]) -> float:
    return max(sums_by_rank(map(time_of, parts(units, points)), rank_of))


def sums_by_rank(numbers: Iterable[float], rank_of: Sequence[int]) -> list[float]:
    """What the stages of each rank have together."""
    totals = [0.0] * (max(rank_of) + 1)
    for rank, number in zip(rank_of, numbers, strict=True):
        totals[rank] += number
    return totals


def test_one_stage_per_rank_needs_no_search() -> None:
    units = llama(12, head=25)
    points = balance_ranks(units, looped(4, 1), in_flight=[4, 3, 2, 1])
    assert points == balance(units, 4, in_flight=[4, 3, 2, 1])


def test_in_a_v_embedding_and_head_share_a_rank() -> None:
    units, rank_of, in_flight = llama(16, head=40), v_shaped(4), [2] * 8
    stages_even = balance(units, 8, in_flight=in_flight)
    points = balance_ranks(units, rank_of, in_flight=in_flight)
    assert slowest_rank(units, stages_even, rank_of) == 182  # both ends and two layers
    assert slowest_rank(units, points, rank_of) == 152  # both ends and one, against five layers


@pytest.mark.exhaustive
@pytest.mark.parametrize("rank_of", [v_shaped(2), looped(2, 2)])
def test_ranks_never_slower_than_with_even_stages_and_mostly_best(
    rank_of: tuple[int, ...],
) -> None:
    best, trials = 0, 60
    for seed in range(trials):
        units = [replace(u, boundary_bytes=0) for u in random_chain(seed)[0]]
        units += [unit("tail", 1, 2)] * max(0, 5 - len(units))
        in_flight = [1] * 4
        found = slowest_rank(units, balance_ranks(units, rank_of, in_flight=in_flight), rank_of)
        assert found <= slowest_rank(units, balance(units, 4, in_flight=in_flight), rank_of)
        cuts = combinations(range(1, len(units)), 3)
        best += found == min(slowest_rank(units, points, rank_of) for points in cuts)
    assert best >= 0.8 * trials


def test_memory_of_a_rank_is_shared_by_its_stages() -> None:
    units, rank_of, in_flight = llama(16, head=0), v_shaped(2), [4, 3, 2, 1]

    def most_held(memory: int | None) -> float:
        points = balance_ranks(units, rank_of, in_flight=in_flight, memory_bytes=memory)
        return max(sums_by_rank(map(held_by, parts(units, points), in_flight), rank_of))

    free = most_held(None)
    with pytest.raises(PlanError, match=r"on 2 ranks: no cut fits 9 bytes .* .rank \d then") as got:
        most_held(9)
    found = re.search(r"the least that works is ([\d,]+) bytes", got.value.what)
    assert found
    needed = int(found[1].replace(",", ""))
    assert needed < free
    assert most_held(needed) == needed
