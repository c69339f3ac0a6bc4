"""Schedules by name: complete, free of deadlock, and as fast and as small as published."""

from __future__ import annotations

import doctest
import random
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import product
from textwrap import indent
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed.pipelining.schedules as reference

from partc.errors import PlanError
from partc.schedules import (
    NAMES,
    blocks,
    csv_form,
    gpipe,
    interleaved,
    make,
    one_f_one_b,
    zb_h1,
    zb_h2,
)
from partc.schedules.actions import Action, Schedule, check_schedule
from partc.schedules.csv_form import read_csv, write_csv
from partc.schedules.picture import grid, svg
from partc.schedules.timing import Costs, Timeline, timeline
from tests.orders import dependencies

Golden = Callable[..., None]
Times = tuple[int, int, int]  # of forward, input gradient and weight gradient
EQUAL: Times = (1, 1, 1)
SIZES = [
    (p, m)
    for p in (2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 15, 16)
    for m in sorted({p, p + 1, 2 * p - 1, 2 * p, 3 * p + 1, 8 * p})
]


def run(name: str, p: int, m: int, times: Times = EQUAL, chunks: int | None = None) -> Timeline:
    schedule = make(name, ranks=p, microbatches=m, chunks=chunks)
    forward, input_grad, weight_grad = times
    costs = Costs.even(
        schedule.stages, forward=forward, input_grad=input_grad, weight_grad=weight_grad
    )
    return timeline(schedule, costs)


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


def chunks_of(name: str) -> list[int]:
    least, most = NAMES[name].chunks
    return [least] if most else [least, least + 1, least + 2]


# --- every size


@pytest.mark.parametrize("name", NAMES)
def test_complete_and_free_of_deadlock(name: str) -> None:
    for p in range(1, 9):
        for m in range(1, 3 * p + 1):
            for chunks in chunks_of(name):
                schedule = make(name, ranks=p, microbatches=m, chunks=chunks)
                check_schedule(schedule)
                assert schedule.stages == p * chunks
                assert NAMES[name].split or not schedule.kinds & {"I", "W"}
                line = timeline(schedule, Costs.even(schedule.stages))
                work = m * chunks * (1 if name == "forward-only" else 3)
                assert line.busy == (work,) * p


# --- published formulas


@pytest.mark.parametrize("times", [EQUAL, (2, 3, 1), (1, 1, 2)])
def test_gpipe_and_1f1b(times: Times) -> None:
    for p, m in SIZES:
        for name in ("gpipe", "1f1b"):
            line = run(name, p, m, times)
            assert Fraction(idle(line)) / Fraction(line.makespan) == Fraction(p - 1, m + p - 1)
            held = [m if name == "gpipe" else min(m, p - rank) for rank in range(p)]
            assert list(line.peaks) == held


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


def _torch_rows(kind: Any, p: int, m: int, chunks: int) -> list[list[Any]]:
    """A rank's actions as torch computes them, without the process group that it asks for."""
    fields = SimpleNamespace(
        pp_group_size=p, _num_stages=p, num_stages=p * chunks, n_local_stages=chunks,
        _n_microbatches=m, microbatches_per_round=m // max(1, m // p), _stages=[None] * chunks,
    )  # fmt: skip
    if hasattr(kind, "_calculate_single_rank_operations"):
        return [kind._calculate_single_rank_operations(fields, rank) for rank in range(p)]
    return list(kind._get_pipeline_order(fields).values())


def _ours(cell: Any) -> tuple[Action, ...]:
    if cell is None or cell.computation_type is reference.REDUCE_GRAD:
        return ()
    return tuple(Action.parse(str(action)) for action in cell.sub_actions or (cell,))


def _dualpipe_groups(p: int, m: int) -> list[list[tuple[Action, ...]]]:
    rows = _torch_rows(reference.ScheduleDualPipeV, p, m, 2)
    return [[_ours(cell) for cell in row] for row in rows]


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
            rows = _torch_rows(kind, p, m, chunks)
            orders = tuple(tuple(a for cell in row for a in _ours(cell)) for row in rows)
            ours = make(name, ranks=p, microbatches=m, chunks=chunks).orders
            if name == "1f1b":  # torch counts the forwards of the last rank from 1
                ours, orders = ours[:-1], orders[:-1]
            assert ours == orders


def test_zb_h1_is_as_fast_as_torch() -> None:
    """Torch's interleaved zero bubble with one stage per rank is ZB-H1 with later weights."""
    for p, m in [(p, m) for p, m in SIZES if m % max(1, m // p) == 0]:
        rows = _torch_rows(reference.ScheduleInterleavedZeroBubble, p, m, 1)
        orders = tuple(tuple(a for cell in row for a in _ours(cell)) for row in rows)
        theirs = timeline(Schedule("torch", orders, tuple(range(p)), m), Costs.even(p))
        ours = run("zb-h1", p, m)
        assert (ours.makespan, max(ours.peaks)) == (theirs.makespan, max(theirs.peaks))


# --- times


def _recount(line: Timeline) -> Iterator[tuple[float, float]]:
    """Starts as they are, and as they follow from the ends of what came before."""
    schedule, costs = line.schedule, line.costs
    rows = zip(schedule.orders, line.ends, strict=True)
    end = {a: e for order, ends in rows for a, e in zip(order, ends, strict=True)}
    for rank, order in enumerate(schedule.orders):
        free = 0.0
        for action, start in zip(order, line.starts[rank], strict=True):
            earliest = free
            for alternatives in dependencies(action, schedule.stages):
                before = next(a for a in alternatives if a in end)
                edge = min(before.stage, action.stage)
                away = schedule.rank_of[before.stage] != rank
                earliest = max(earliest, end[before] + costs.transfer[edge] * away)
            yield start, earliest
            free = end[action]


@pytest.mark.parametrize("name", NAMES)
def test_every_action_starts_as_early_as_it_can(name: str) -> None:
    draw = random.Random(name)
    for p, m in [(1, 3), (2, 1), (3, 7), (5, 4), (8, 17)]:
        schedule = make(name, ranks=p, microbatches=m)
        rows = [[draw.randint(1, 9) for _ in range(schedule.stages)] for _ in range(6)]
        costs = Costs(*(tuple(row) for row in rows))
        line = timeline(schedule, costs)
        assert all(start == earliest for start, earliest in _recount(line))
        lasts = dict(zip("FIW", rows, strict=False))
        lasts["B"] = [i + w for i, w in zip(lasts["I"], lasts["W"], strict=True)]
        for order, starts, ends in zip(schedule.orders, line.starts, line.ends, strict=True):
            spans = zip(order, starts, ends, strict=True)
            assert all(end - start == lasts[a.kind][a.stage] for a, start, end in spans)


def test_what_waits_for_weights_is_held_longer() -> None:
    schedule = read_csv("0F0,0F1,0I0,0I1,0W0,0W1")
    for waiting, peak in [(0, 10), (2, 10), (5, 10), (12, 24)]:
        costs = Costs.even(1, activation=5, waiting=waiting)
        assert timeline(schedule, costs).peaks == (peak,)


def test_a_circle_of_waits_is_told() -> None:
    crossed = read_csv("0F0,0F1,0B0,0B1\n1F1,1F0,1B1,1B0")
    timeline(crossed, Costs.even(2))  # rank 1 waits for microbatch 1, but in the end all is there
    with pytest.raises(PlanError) as circle:
        timeline(read_csv("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1", "mine"), Costs.even(2))
    assert circle.value.where == "schedule mine, pipeline rank 0, action 0B0"
    assert circle.value.what == "the order never finishes: 2 ranks wait for each other in a circle"
    assert circle.value.why == (
        "rank 0 stands at 0B0, which needs 1B0 of rank 1; "
        "rank 1 stands at 1F1, which needs 0F1 of rank 0"
    )
    with pytest.raises(PlanError, match="it stands before an action of its own rank") as own:
        timeline(read_csv("0F0,0W0,0I0"), Costs.even(1))
    assert own.value.why == "rank 0 stands at 0W0, which needs 0I0 of rank 0"


# --- names, files and pictures


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"name": "1f2b"}, "no such schedule. Known are gpipe, 1f1b, interleaved-1f1b"),
        ({"name": "1f1b", "ranks": 0}, "cannot be made for 0 pipeline ranks"),
        ({"name": "1f1b", "microbatches": 0}, "cannot be made for 0 microbatches"),
        ({"name": "v-min", "chunks": 3}, "it takes exactly 2). Ask for 2, or a schedule that"),
        ({"name": "1f1b", "chunks": 2}, "exactly 1). Ask for 1, or a schedule that takes 2: inter"),
        ({"name": "interleaved-1f1b", "chunks": 1}, "it takes at least 2). Ask for 2, or a sched"),
        ({"name": "zb-v", "chunks": -1}, "exactly 2). Ask for 2."),
    ],
)
def test_refused(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError) as refused:
        make(**{"ranks": 2, "microbatches": 2, **asked})
    assert says in str(refused.value)


@pytest.mark.parametrize("name", NAMES)
def test_csv_is_read_back_and_torch_reads_it(name: str) -> None:
    schedule = make(name, ranks=3, microbatches=7)
    text = write_csv(schedule)
    assert read_csv(text, name) == schedule
    cells = [line.split(",") for line in text.splitlines()]
    rows = [[reference._Action.from_str(cell) for cell in row] for row in cells]
    assert tuple(tuple(a for cell in row for a in _ours(cell)) for row in rows) == schedule.orders


def test_csv_with_bubbles_and_overlapped_pairs() -> None:
    rows = _torch_rows(reference.ScheduleDualPipeV, 3, 8, 2)
    text = "\r\n".join(",".join("" if c is None else str(c) for c in row) for row in rows)
    assert "OVERLAP_F_B" in text
    assert (
        read_csv(f"{text},,\r\n\r\n").orders == make("dualpipe-v", ranks=3, microbatches=8).orders
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (" \n", "there is no action in it"),
        ("0F0,0SEND_F0,0B0", "row 1, column 2: '0SEND_F0': this is not an action"),
        ("0F0,0B0\n\n2F0,2B0", "stage 1 stands in no row"),
        ("0F0,0B0\n0F1,0B1", "rank 1, action 0F1: the stage belongs to another rank"),
        ("0F0,0F2,0B0,0B2", "stage 0 runs nothing for microbatch 1"),
        ("0F0,0F0,0B0", "the action stands twice"),
        ("0F0,0I0", "stage 0 runs F, I for microbatch 0"),
        ("0F0,0F999999999", "stage 0 runs nothing for microbatch 1 ("),
        ("0F" + "9" * 5000, "this is not an action"),
    ],
)
def test_bad_csv(text: str, says: str) -> None:
    with pytest.raises(PlanError) as bad:
        read_csv(text)
    assert says in str(bad.value)


@pytest.mark.parametrize("name", NAMES)
def test_grid(name: str, golden: Golden) -> None:
    golden(grid(run(name, 4, 6)))


def test_docstrings_show_what_is_made() -> None:
    for module, name in [
        (gpipe, "gpipe"),
        (one_f_one_b, "1f1b"),
        (zb_h1, "zb-h1"),
        (zb_h2, "zb-h2"),
    ]:
        assert module.__doc__
        assert indent(grid(run(name, 3, 4)), "    ") in module.__doc__
    for module in (blocks, csv_form, interleaved, one_f_one_b):
        tried = doctest.testmod(module)
        assert tried.attempted > 0
        assert tried.failed == 0


def test_grid_loses_its_middle(golden: Golden) -> None:
    golden(grid(run("1f1b", 3, 100), columns=20))


def test_svg_has_a_box_for_every_action() -> None:
    line = run("v-half", 3, 5)
    root = ElementTree.fromstring(svg(line))
    boxes = [box for box in root if box.tag.endswith("rect") and len(box)]
    drawn = [box[0].text for box in boxes]
    assert drawn == [str(action) for order in line.schedule.orders for action in order]
    colours = {box.get("fill") for box in boxes}
    assert len(colours) == 6  # F, I and W, each in two shades
    named = Schedule("<mine> & yours", line.schedule.orders, line.schedule.rank_of, 5)
    ElementTree.fromstring(svg(timeline(named, line.costs)))
