"""Schedules by name: complete, free of deadlock, as early as can be; their files and pictures."""

from __future__ import annotations

import doctest
import random
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from importlib import import_module
from pkgutil import iter_modules
from textwrap import indent
from typing import Any

import pytest
import torch.distributed.pipelining.schedules as reference

from partc.errors import PlanError
from partc.schedules import NAMES, blocks, csv_form, make, orders
from partc.schedules.actions import Schedule, check_schedule
from partc.schedules.csv_form import read_csv, write_csv
from partc.schedules.orders import interleaved, one_f_one_b
from partc.schedules.picture import grid, svg
from partc.schedules.timing import Costs, Timeline, timeline
from tests.schedules.orders import actions_of, dependencies, run, torch_rows

Golden = Callable[..., None]


def chunks_of(name: str) -> list[int]:
    least, most = NAMES[name].chunks
    return [least] if most else [least, least + 1, least + 2]


# --- every size


@pytest.mark.exhaustive
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
        ({"name": "1f2b"}, "no such schedule (there are gpipe, 1f1b, interleaved-1f1b"),
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
    assert (
        tuple(tuple(a for cell in row for a in actions_of(cell)) for row in rows) == schedule.orders
    )


def test_csv_with_bubbles_and_overlapped_pairs() -> None:
    rows = torch_rows(reference.ScheduleDualPipeV, 3, 8, 2)
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
        ("0F1,0F2,0B1,0B2", "pipeline rank 0: stage 0 runs nothing for microbatch 0 ("),
        ("0F1,0F2,0B1,0B2", "microbatches and stages are counted from 0"),
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
    shown = []
    for info in iter_modules(orders.__path__):
        text = import_module(f"{orders.__name__}.{info.name}").__doc__ or ""
        for name in re.findall(r"^    (\S+): 3 ranks, 4 microbatches, bubble", text, re.MULTILINE):
            assert indent(grid(run(name, 3, 4)), "    ") in text
            shown.append(name)
    assert {"gpipe", "1f1b", "zb-h1", "zb-h2"} <= {*shown}
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


def test_a_cell_that_is_too_long_is_refused() -> None:
    with pytest.raises(PlanError, match="is no CSV text"):
        read_csv("0F0," + "x" * 200_000)
