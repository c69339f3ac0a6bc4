"""The table of passes as people read it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from partc.lowering import PASSES, WIDTH, described, table
from partc.passes.runner import Table
from tests.house import HERE


def test_table(golden: Callable[..., None]) -> None:
    lines = [*described(Table(PASSES))]
    assert max(map(len, lines)) <= WIDTH
    golden("\n".join(lines))


def test_every_pass_says_why_and_stands_in_a_file() -> None:
    for each in PASSES:
        assert each.why, each.name
        assert (HERE / each.where).exists(), each.where


@pytest.mark.parametrize("name", Table(PASSES).optional)
def test_a_pass_that_is_left_out_is_marked(name: str) -> None:
    marked = [line for line in described(table(left_out=[name])) if line.endswith("; left out")]
    assert marked
    assert all(f" {name} " in line for line in marked)
