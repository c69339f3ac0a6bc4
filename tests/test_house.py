"""The rooms of the source stand in one order, and each says what it is."""

from __future__ import annotations

import ast

import pytest

from tests.house import FACE, GROUND, HERE, ROOMS, TOP, House, part_of, report, room_of

HOUSE = House(HERE)


def test_rooms_import_only_from_rooms_before_them() -> None:
    assert [str(each) for each in HOUSE.upward()] == []


def test_modules_named_in_strings_exist() -> None:
    assert HOUSE.stale_names() == []


def test_circles_stay_in_a_room() -> None:
    leaving = [circle for circle in HOUSE.circles() if len({*map(room_of, circle)}) > 1]
    assert leaving == []


def test_every_room_has_modules_and_every_module_a_room() -> None:
    rooms = {room_of(name) for name in HOUSE.files if name != FACE}
    assert rooms == {*ROOMS}


def test_the_report_counts_every_module_once() -> None:
    lines = [line for line in report(HOUSE) if "modules" in line and not line.startswith("circles")]
    counts = [int(line.rpartition(" modules")[0].split()[-1]) for line in lines]
    parts = [count for line, count in zip(lines, counts, strict=True) if line.startswith("  of it")]
    assert counts[-1] == len(HOUSE.files) == sum(counts[:-1]) - sum(parts)


def test_an_import_is_seen_wherever_it_stands() -> None:
    seen = {(each.importer, each.imported) for each in HOUSE.imports}
    assert ("partc.graph", "partc.graph.graph_text") in seen  # inside of a function
    assert ("partc", "partc.api") in seen  # under TYPE_CHECKING


@pytest.mark.parametrize("room", [room for room in ROOMS if room not in (GROUND, TOP)])
def test_a_room_says_what_it_is(room: str) -> None:
    says_what_it_is(room)


PARTS = sorted({part_of(name, HOUSE.files) for name in HOUSE.files if name != FACE} - {""})


@pytest.mark.parametrize("part", [part for part in PARTS if part.startswith("partc.program.")])
def test_a_part_of_the_largest_room_says_what_it_is(part: str) -> None:
    says_what_it_is(part)


def says_what_it_is(room: str) -> None:
    text = HOUSE.files[room].read_text(encoding="utf-8")
    lines = (ast.get_docstring(ast.parse(text)) or "").splitlines()
    starts = [
        word for line in lines for word in ("In:", "Out:", "Start:", "Never:") if word in line
    ]
    assert starts == ["In:", "Out:", "Start:", "Never:"]
