"""What is counted before a program is printed is what the printed program is found to hold."""

from __future__ import annotations

from typing import Any, Literal
from unittest.mock import patch

import pytest

import partc
from partc import accounts, printing
from partc.cost.memory_limit import TOLERANCE, Peak, check_memory
from partc.errors import MemoryLimitError
from partc.passes import runner
from partc.plan import Plan
from tests.overlap.words import step
from tests.pipelines import toy

MUCH = 10**15


class Noted:
    """The peaks of all accounts that a compile made, and how often it printed."""

    def __init__(self, *given: Any, **options: Any) -> None:
        self.peaks: list[list[Peak] | None] = []
        self.prints = 0
        real = runner._run_one

        def one(state: Any, row: int, each: Any) -> None:
            real(state, row, each)
            if each.run in (accounts.account_step, accounts.account_pipeline):
                self.peaks.append(state.made["peaks"])
            self.prints += each.run in (printing.print_step, printing.print_pipeline)

        with patch.object(runner, "_run_one", one):
            self.cost: Any = partc.compile(*given, **options).cost


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mesh", "preset"),
    [
        ("dp=1", "ddp"), ("dp=2", "ddp"), ("dp=4", "ddp"), ("dp=2", "zero1"), ("dp=2", "zero2"),
        ("dp=2", "fsdp"), ("dp=4", "fsdp"), ("tp=2", "megatron"), ("tp=2", "megatron-sp"),
        ("dp=2,tp=2", "fsdp+megatron"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_step_of_one_stage(mesh: str, preset: str, backend: Literal["gloo", "nccl"]) -> None:
    plan = Plan(preset=preset, memory_bytes=MUCH, backend=backend)
    assert_agrees(Noted(step(), mesh, plan=plan))


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "zb-v", "interleaved-1f1b"])
@pytest.mark.parametrize(("mesh", "preset"), [("pp=2", "ddp"), ("pp=2,dp=2", "fsdp")])
def test_pipelines(mesh: str, preset: str, schedule: str) -> None:
    virtual = {"zb-v": 2, "interleaved-1f1b": 2}.get(schedule, 1)
    plan = Plan(
        preset=preset, schedule=schedule, microbatches=4, virtual_stages=virtual, memory_bytes=MUCH
    )
    assert_agrees(Noted(toy().step, mesh, plan=plan))


def assert_agrees(noted: Noted) -> None:
    (accounted,) = noted.peaks
    assert accounted is not None
    for peak, found in zip(accounted, noted.cost.peaks(), strict=True):
        assert peak.state == found.state
        assert abs(peak.num_bytes / found.num_bytes - 1) <= TOLERANCE, (peak, found)


@pytest.mark.exhaustive
def test_the_least_is_printed_once() -> None:
    """Where two blocks gathered ahead do not fit, the program with one is the only one printed."""
    plan = Plan(preset="fsdp", memory_bytes=MUCH)
    (most,) = Noted(step(), "dp=2", plan=plan).cost.peaks()
    noted = Noted(step(), "dp=2", plan=plan.changed(memory_bytes=most.num_bytes - 1))
    assert (len(noted.peaks), noted.prints) == (2, 1)


def test_nothing_is_counted_without_a_limit() -> None:
    noted = Noted(step(), "dp=2", plan=Plan(preset="fsdp"))
    (accounted,) = noted.peaks
    assert accounted is None
    assert noted.prints == 1


def test_an_account_that_was_too_low_is_named() -> None:
    state = (("parameters", 10),)
    low, high = (Peak("every rank", size, state, ()) for size in (100, 200))
    with pytest.raises(MemoryLimitError, match="100 bytes were expected before"):
        check_memory([high], [150], [low])
    with pytest.raises(MemoryLimitError) as caught:
        check_memory([high], [150], [high])
    assert "expected" not in str(caught.value)
