"""Schedules are as fast and as small as published, and their orders are torch's."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import product
from typing import Any

import pytest
import torch.distributed.pipelining.schedules as reference

from partc.schedules import make
from partc.schedules.actions import Action, Schedule
from partc.schedules.timing import Costs, Timeline, timeline
from tests.schedules.orders import EQUAL, Times, actions_of, dependencies, run, torch_rows

SIZES = [
    (p, m)
    for p in (2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 15, 16)
    for m in sorted({p, p + 1, 2 * p - 1, 2 * p, 3 * p + 1, 8 * p})
]


def idle(line: Timeline) -> float:
    """What every rank idles, from the first start of any rank to the last end."""
    assert len(set(line.busy)) == 1
    return line.makespan - line.busy[0]


def idle_in_span(line: Timeline) -> float:
    """What the rank with the longest time from its own first start to its own last end idles.

    That is the bubble of the zero-bubble papers: if the next step begins on each rank as soon as
    the rank is done, the late start of the later ranks is paid only once.
    """
    spans = [ends[-1] - starts[0] for starts, ends in zip(line.starts, line.ends, strict=True)]
    return max(spans) - line.busy[0]


# --- published formulas


@pytest.mark.exhaustive
@pytest.mark.parametrize("times", [EQUAL, (2, 3, 1), (1, 1, 2)])
def test_gpipe_and_1f1b(times: Times) -> None:
    for p, m in SIZES:
        for name in ("gpipe", "1f1b"):
            line = run(name, p, m, times)
            assert Fraction(idle(line)) / Fraction(line.makespan) == Fraction(p - 1, m + p - 1)
            held = [m if name == "gpipe" else min(m, p - rank) for rank in range(p)]
            assert list(line.peaks) == held


@pytest.mark.rows(1)
@pytest.mark.parametrize("chunks", [2, 3])
def test_several_stages_per_rank_divide_the_bubble(chunks: int) -> None:
    for p, m in SIZES:
        published = Fraction(p - 1, chunks * m + p - 1)
        turn = -(-m // (m // p))  # microbatches in a round, p if it divides m
        held = {
            "interleaved-1f1b": [
                min(chunks * m, (chunks - 1) * turn + 2 * (p - 1 - rank) + 1) for rank in range(p)
            ],
            "looped-bfs": [chunks * m] * p,
            "forward-only": [0] * p,
        }
        for name, expected in held.items():
            line = run(name, p, m, chunks=chunks)
            assert Fraction(idle(line)) / Fraction(line.makespan) == published
            assert list(line.peaks) == expected


@pytest.mark.exhaustive
@pytest.mark.parametrize("times", [EQUAL, (2, 2, 1), (1, 2, 1), (3, 2, 2)])
def test_zero_bubble_with_one_stage(times: Times) -> None:
    """H1: (p-1)(F+I-W), with equal times a third of 1F1B's; H2: (p-1)(F+I-2W) in a rank's span."""
    forward, input_grad, weight_grad = times
    for p, m in SIZES:
        first = run("zb-h1", p, m, times)
        assert idle(first) == (p - 1) * (forward + input_grad - weight_grad)
        assert max(first.peaks) == p
        if m >= 2 * p - 1:
            second = run("zb-h2", p, m, times)
            assert idle_in_span(second) == (p - 1) * (forward + input_grad - 2 * weight_grad)
            assert max(second.peaks) == 2 * p - 1
    if times == EQUAL:
        assert 3 * idle(run("zb-h1", 8, 20)) == idle(run("1f1b", 8, 20))


@pytest.mark.exhaustive
def test_v_schedules() -> None:
    """Of 1F1B's idle time 6(p-1): ZB-V none in a span, V-Half a half, V-Min two thirds +- 1 slot.

    Their memory is 1, (p+2)//2 : p and (p+4)//3 : p of 1F1B's, a microbatch being two stages.
    """
    for p, m in SIZES:
        zero, half, least = (run(name, p, m) for name in ("zb-v", "v-half", "v-min"))
        assert idle(zero) == p - 1
        if m >= 2 * p - 1:
            assert idle_in_span(zero) == 0
        assert idle(half) == 3 * (p - 1) - p % 2
        assert idle(least) == 4 * (p - 1) + (-1 if p % 3 else 1)
        assert max(zero.peaks) == 2 * p
        assert max(half.peaks) == 2 * ((p + 2) // 2)
        assert max(least.peaks) == 2 * ((p + 4) // 3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("times", [EQUAL, (2, 2, 1), (3, 3, 2), (3, 2, 2)])
def test_dualpipe_v(times: Times) -> None:
    forward, input_grad, weight_grad = times
    pair = backward = input_grad + weight_grad
    pair += forward
    for p, m in SIZES:
        if m < 2 * p:
            continue
        line = run("dualpipe-v", p, m, times)
        assert idle(line) == (p - 1) * (forward + input_grad - weight_grad)
        assert line.peaks == (2 * p + 1,) * p
        if p <= 8 and forward == input_grad:
            whole = _span_of_groups(_dualpipe_groups(p, m), 2 * p, times)
            published = (p - 1) * (pair + backward - 3 * weight_grad)
            assert whole - line.busy[0] == published


def test_formulas_hold_for_the_times_that_the_docstrings_name() -> None:
    p, m = 5, 11
    for times in product(range(1, 6), range(1, 6), range(1, 6)):
        forward, input_grad, weight_grad = times
        if weight_grad <= min(forward, input_grad):
            expected = (p - 1) * (forward + input_grad - weight_grad)
            assert idle(run("zb-h1", p, m, times)) == expected
            assert idle_in_span(run("zb-h2", p, m, times)) == expected - (p - 1) * weight_grad
            if input_grad <= forward <= input_grad + weight_grad:
                assert idle(run("dualpipe-v", p, m, times)) == expected


def _span_of_groups(rows: list[list[tuple[Action, ...]]], stages: int, times: Times) -> int:
    """The makespan if actions of a group start together, and end together after their sum."""
    forward, input_grad, weight_grad = times
    lasts = {"F": forward, "I": input_grad, "W": weight_grad, "B": input_grad + weight_grad}
    end: dict[Action, int] = {}
    free, left = [0] * len(rows), [list(row) for row in rows]
    while any(left):
        for rank, row in enumerate(left):
            while row:
                needs = [alternatives for a in row[0] for alternatives in dependencies(a, stages)]
                found = [[end[a] for a in alternatives if a in end] for alternatives in needs]
                if not all(found):
                    break
                start = max([free[rank], *(ends[0] for ends in found)])
                free[rank] = start + sum(lasts[action.kind] for action in row[0])
                end.update(dict.fromkeys(row.pop(0), free[rank]))
    return max(free)


# --- torch's own orders


def _dualpipe_groups(p: int, m: int) -> list[list[tuple[Action, ...]]]:
    rows = torch_rows(reference.ScheduleDualPipeV, p, m, 2)
    return [[actions_of(cell) for cell in row] for row in rows]


ORACLES: dict[str, tuple[Any, list[int], Callable[[int, int], bool]]] = {
    "gpipe": (reference.ScheduleGPipe, [1], lambda p, m: True),
    "1f1b": (reference.Schedule1F1B, [1], lambda p, m: m >= p),
    "interleaved-1f1b": (
        reference.ScheduleInterleaved1F1B, [2, 3], lambda p, m: m % max(1, m // p) == 0,
    ),
    "looped-bfs": (reference.ScheduleLoopedBFS, [2, 3], lambda p, m: True),
    "zb-v": (reference.ScheduleZBVZeroBubble, [2], lambda p, m: m >= 2 * p - 1),
    "dualpipe-v": (reference.ScheduleDualPipeV, [2], lambda p, m: m >= 2 * p),
}  # fmt: skip


@pytest.mark.parametrize("name", ORACLES)
def test_same_order_as_torch(name: str) -> None:
    kind, all_chunks, applies = ORACLES[name]
    sizes = [(p, m) for p in range(1, 7) for m in range(1, 3 * p + 2) if applies(p, m)]
    for p, m in sizes:
        for chunks in all_chunks:
            rows = torch_rows(kind, p, m, chunks)
            orders = tuple(tuple(a for cell in row for a in actions_of(cell)) for row in rows)
            ours = make(name, ranks=p, microbatches=m, chunks=chunks).orders
            if name == "1f1b":  # torch counts the forwards of the last rank from 1
                ours, orders = ours[:-1], orders[:-1]
            assert ours == orders


def test_zb_h1_is_as_fast_as_torch() -> None:
    """Torch's interleaved zero bubble with one stage per rank is ZB-H1 with later weights."""
    for p, m in [(p, m) for p, m in SIZES if m % max(1, m // p) == 0]:
        rows = torch_rows(reference.ScheduleInterleavedZeroBubble, p, m, 1)
        orders = tuple(tuple(a for cell in row for a in actions_of(cell)) for row in rows)
        theirs = timeline(Schedule("torch", orders, tuple(range(p)), m), Costs.even(p))
        ours = run("zb-h1", p, m)
        assert (ours.makespan, max(ours.peaks)) == (theirs.makespan, max(theirs.peaks))
