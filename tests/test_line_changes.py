"""Texts are compared line by line, but not for minutes where a line is repeated without end."""

from __future__ import annotations

from partc.line_changes import MOST_PAIRS, comparable, line_changes
from partc.program.user_lines import UserLines


def test_changes_are_those_of_difflib() -> None:
    assert line_changes(["a", "b", "c"], ["a", "x", "c", "d"]) == [
        ("equal", 0, 1, 0, 1), ("replace", 1, 2, 1, 2), ("equal", 2, 3, 2, 3),
        ("insert", 3, 3, 3, 4),
    ]  # fmt: skip


def test_a_line_without_end_is_not_compared() -> None:
    old, new = [""] * 2_000_000, ["", "a", ""]
    assert comparable(old[: MOST_PAIRS // 2], new)
    assert not comparable(old, new)
    assert line_changes(old, new) == [("replace", 0, 2_000_000, 0, 3)]


def test_calls_of_a_text_that_is_all_new_are_not_guessed() -> None:
    lines = UserLines({1: ("up", "net.py:3: x")})
    longer = "\n".join(f"y{i} = {i}" for i in range(301))
    assert lines.moved("x = 1\n" * 300, longer).of == {}  # 90,000 pairs: nobody waits for them
    assert lines.moved("x = 1", "x = 2").of == lines.of
