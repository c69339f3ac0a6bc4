"""A dry run of few layers says what one of all of them says, or is not believed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

import partc
from partc.dryrun.layers import most_of_all
from partc.dryrun.live_memory import Lines, LiveMemory, Peak
from partc.dryrun.run import Built, Known, dry_run
from partc.plan import Plan
from tests.dry_runs import dry_run_all
from tests.pipelines import toy


@pytest.mark.rows(1)
@pytest.mark.parametrize(
    ("mesh", "preset", "recompute", "microbatches"),
    [
        ("dp=2", "ddp", "cheap", 1),
        ("dp=2", "fsdp", "block", 1),
        ("dp=2,tp=2", "fsdp+megatron-sp", "cheap", 6),
        ("pp=2,dp=2", "zero1", "cheap", 4),
    ],
)
def test_the_same_peak_line_and_holders(
    mesh: str, preset: str, recompute: Any, microbatches: int
) -> None:
    step = toy(28 if mesh[:2] == "dp" else 54).step
    plan = Plan(preset=preset, recompute=recompute)
    program = partc.compile(step, mesh, microbatches=microbatches, plan=plan)
    for number in range(program.mesh.pipeline_ranks):
        rank = program.mesh.first_rank(number)
        role, known = program.role(rank), Known()
        found = dry_run(role, rank, known)
        layers = Built.of(role, rank).depth
        assert sorted(known) == [layers - num for num in (6, 5, 4)]  # none with all of them
        assert found == dry_run_all(role, rank)


class Held(LiveMemory):
    """A run that held so many bytes at its only place."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__("here.py")
        self.peaks = {("step", "block"): Peak(num_bytes, line=1)}

    def lines_at(self, peak: Peak) -> Lines:
        return Counter({1: peak.num_bytes})


@pytest.mark.parametrize(
    ("short", "expected", "executed"),
    [((10, 12, 14), 14 + 2 * 24, [26, 25, 24]), ((10, 12, 15), 99, [26, 25, 24, 0])],
)
def test_what_is_not_linear_is_executed(
    short: Sequence[int], expected: int, executed: list[int]
) -> None:
    known = dict(zip((26, 25, 24, 0), map(Held, (*short, 99)), strict=True))
    asked: list[int] = []

    def shortened(left_out: int) -> LiveMemory:
        asked.append(left_out)
        return known[left_out]

    assert most_of_all(shortened, 30)[0] == expected
    assert asked == executed
