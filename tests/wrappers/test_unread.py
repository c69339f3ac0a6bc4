"""Which variables of the running functions nothing reads again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from partc.wrappers.unread import unread_values


class Value:
    """What the tests look for in variables."""

    def eval(self) -> None:
        """A method of this name reads no variables."""


def unread() -> int:
    return len(unread_values((Value,)))


def behind_its_loop() -> int:
    for value in [Value()]:
        value.eval()
    return unread()


def in_its_loop() -> int:
    found = 0
    for value in [Value(), Value()]:
        found += unread()
        str(value)
    return found


def read_in_the_next_turn() -> int:
    value, found = Value(), 0
    for _ in range(2):
        if found is not None:
            str(value)
        found += unread()
    return found


def set_anew() -> int:
    value = Value()
    found = unread()
    value = Value()
    str(value)
    return found


def read_by_a_handler() -> int:
    value = Value()
    try:
        found = unread()
    except ZeroDivisionError:
        str(value)
    return found


def read_on_one_branch() -> int:
    value = Value()
    found = unread()
    if found:
        str(value)
    return found


def read_by_a_closure() -> int:
    value = Value()

    def read() -> Value:
        return value

    found = unread()
    str(read)
    return found


def read_by_name() -> int:
    value = Value()
    mine = locals()
    found = unread()
    assert mine["value"] is value
    return found


def read_by_a_name_of_vars() -> int:
    value = Value()
    mine = vars()
    found = unread()
    assert mine["value"] is value
    return found


def beside_vars_of_another() -> int:
    options = Value()
    str(vars(options)), str(dir(options))
    for value in [Value()]:
        str(value)
    found = unread()
    str(options)
    return found


def of_a_caller() -> int:
    value = Value()
    str(value)
    return behind_its_loop()


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (behind_its_loop, 1), (in_its_loop, 0), (read_in_the_next_turn, 0), (set_anew, 1),
        (of_a_caller, 2), (read_by_a_handler, 0), (read_on_one_branch, 0),
        (read_by_a_closure, 0), (read_by_name, 0), (read_by_a_name_of_vars, 0),
        (beside_vars_of_another, 1),
    ],
)  # fmt: skip
def test_variables_of_functions(function: Callable[[], int], expected: int) -> None:
    assert function() == expected


def test_variables_of_a_script_may_be_read_by_all() -> None:
    code = "for value in [Value()]:\n    str(value)\nfound = unread()"
    variables: dict[str, Any] = {"Value": Value, "unread": unread}
    exec(code, variables)
    assert variables["found"] == 0
