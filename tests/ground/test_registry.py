from pathlib import Path
from typing import Any

import pytest

from partc.errors import UsageError
from partc.registry import Registry, is_again


@pytest.fixture
def schedules() -> Registry[str]:
    registry = Registry[str]("schedule")
    for name in ("gpipe", "1f1b", "zero_bubble"):
        registry.add(name, name.upper())
    return registry


def test_registry_keeps_order(schedules: Registry[str]) -> None:
    assert list(schedules) == ["gpipe", "1f1b", "zero_bubble"]
    assert len(schedules) == 3
    assert "gpipe" in schedules
    assert schedules["gpipe"] == "GPIPE"


def test_register_returns_what_it_decorates() -> None:
    registry = Registry[object]("pass")

    @registry.register("nothing")
    def nothing() -> None: ...

    assert registry["nothing"] is nothing


def test_duplicate_is_rejected(schedules: Registry[str]) -> None:
    with pytest.raises(UsageError, match="schedule 'gpipe': the name is taken"):
        schedules.add("gpipe", "other")
    assert schedules["gpipe"] == "GPIPE"


def test_a_cell_that_runs_again_is_told_from_a_name_said_twice() -> None:
    cells: list[dict[str, Any]] = [{"__name__": name} for name in ("__main__", "__main__", "mine")]
    for cell in cells:
        exec("def f(): ...\ng = lambda: 0", cell)
    first, again, other = cells
    assert is_again(again["f"], first["f"])
    assert not is_again(again["g"], first["g"])
    assert not is_again(other["f"], first["f"])
    assert not is_again(other["f"], other["f"])


def test_two_lines_of_one_script_say_a_name_twice(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("def f(): ...\nfirst = f\ndef f(): ...\n")
    ran: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(script.read_text(), script, "exec"), ran)
    again: dict[str, Any] = {"__name__": "__main__"}  # as %run in a notebook
    exec(compile("\n" + script.read_text(), script, "exec"), again)
    assert not is_again(ran["f"], ran["first"])
    assert is_again(again["first"], ran["first"])


def test_near_miss_is_suggested(schedules: Registry[str]) -> None:
    with pytest.raises(UsageError, match=r"no schedule is named 'gpip'\. Did you mean gpipe\?"):
        schedules["gpip"]


def test_far_miss_lists_all(schedules: Registry[str]) -> None:
    with pytest.raises(UsageError, match=r"Known: gpipe, 1f1b, zero_bubble\."):
        schedules["interleaved"]


def test_miss_in_empty_registry() -> None:
    with pytest.raises(UsageError, match=r"Known: none\."):
        Registry[int]("pass")["memory"]
