"""Time-outs of tests follow the machine's speed."""

import ast
from pathlib import Path

import pytest

from tests.patience import patience, slowness

TESTS = Path(__file__).parent
TIMEOUTS = ("timeout", "timeout_s")


def test_a_slower_machine_is_given_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert slowness() >= 1
    monkeypatch.setattr("tests.patience.slowness", lambda: 3.0)
    assert patience(2.0) == 6.0


def test_no_test_gives_up_after_a_fixed_time() -> None:
    fixed = [
        f"{path.relative_to(TESTS)}:{each.value.lineno}"
        for path in sorted(TESTS.rglob("*.py"))
        if "golden" not in path.parts
        for each in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(each, ast.keyword) and each.arg in TIMEOUTS
        if isinstance(each.value, ast.Constant)
    ]
    assert fixed == []
