"""`partc doctor` on ranks: it compares them, their clocks and their links."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from partc.doctor import between
from partc.verification.processes import Processes
from tests.forked_scripts import run_ranks
from tests.launch.saved import saved_program

pytestmark = pytest.mark.gloo
HOSTS = ["a", "a", "b", "c"]  # of four ranks


def clocks_apart(ahead_s: float) -> list[tuple[str, str]]:
    """What rank 0 finds where the clock of rank 2 is ahead."""
    own = time.time
    if dist.get_rank() == 2:
        between.time.time = lambda: own() + ahead_s  # type: ignore[attr-defined]
    try:
        found = between.compare_clocks(HOSTS)
    finally:
        between.time.time = own  # type: ignore[attr-defined]
    return [(each.state, each.found) for each in found]


def test_a_host_whose_clock_is_ahead_is_named(world: Processes) -> None:
    first, *others = world.run(clocks_apart, 7.5)
    ((state, told),) = first
    assert state == "wrong"
    assert "differ from a's: b by +7" in told
    assert "c by" not in told
    assert others == [[], [], []]


def test_clocks_of_one_machine_are_alike(world: Processes) -> None:
    ((state, told),) = world.run(clocks_apart, 0.0)[0]
    assert state == "ok"
    assert told.startswith("3 hosts, ")


def test_all_ranks_are_looked_at(tmp_path: Path) -> None:
    saved_program("dp=2").save(tmp_path / "build")
    found = doctor(tmp_path, 2, "--links", "0.5")
    what = {each["what"]: each for each in found["findings"]}
    assert what["program"]["state"] == "ok"
    assert what["program of all ranks"]["state"] == "ok"
    assert what["torch of all ranks"]["state"] == "ok"
    assert "of the predicted" in what["all_reduce between ranks"]["found"]


def test_ranks_that_see_another_program_are_told(tmp_path: Path) -> None:
    saved_program("dp=2,tp=2").save(tmp_path / "build")
    found = doctor(tmp_path, 2, "--links", "0")
    what = {each["what"]: each for each in found["findings"]}
    assert what["program"]["state"] == "wrong"
    assert "has 4 ranks; there are 2" in what["program"]["found"]


def doctor(folder: Path, ranks: int, *options: str) -> dict[str, Any]:
    """What rank 0 says; the exit code has to say the same."""
    script = folder / "doctor.py"
    script.write_text("import sys\nfrom partc.cli.main import main\nsys.exit(main(sys.argv[1:]))")
    words = ("doctor", "build", "--json", *options)
    first, *_ = run_ranks(script, *words, num=ranks, ends_all=False)
    line = next((each for each in first.text.splitlines() if each.startswith("{")), None)
    assert line, first.text
    found: dict[str, Any] = json.loads(line)
    assert (first.code == 0) == found["ok"]
    return found
