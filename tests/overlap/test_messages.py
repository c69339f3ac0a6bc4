"""Where gloo's copies count, ranks send each other what it would gather, or sum and scatter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

import partc
from partc.errors import PlanError
from partc.machines.topology import Topology
from partc.plan import Plan
from partc.plan.mesh import Mesh
from partc.program import Program
from partc.program.helper_file import helpers_of
from tests.overlap.words import step

SENDS = "class Messages(dist.Work):"


def compiled(mesh: str | Mesh = "dp=2", plan: str | Plan = "fsdp") -> Program:
    return partc.compile(step(), mesh, plan=plan)


def on(machine: str, memory_bytes_per_s: float | None = None) -> Mesh:
    """dp=2 on such a machine, perhaps with another memory."""
    hardware = Topology.load(machine, 2)
    if memory_bytes_per_s is not None:
        groups = tuple(
            (replace(device, memory_bytes_per_s=memory_bytes_per_s), num)
            for device, num in hardware.groups
        )
        hardware = replace(hardware, groups=groups)
    return Mesh((("dp", 2),), hardware)


@pytest.mark.exhaustive
def test_a_program_sends_messages_where_copies_count() -> None:
    made = compiled()
    assert "messages = true" in made.plan
    assert SENDS in helpers_of(made.sources)
    quick = compiled(on("cpu", memory_bytes_per_s=5e13))
    assert "messages = false" in quick.plan
    assert SENDS not in helpers_of(quick.sources)


@pytest.mark.exhaustive
@pytest.mark.parametrize("machine", ["dgx-h100", "cpu"])
def test_it_is_gloo_that_copies(machine: str) -> None:
    assert (SENDS in helpers_of(compiled(on(machine)).sources)) == (machine == "cpu")


@pytest.mark.exhaustive
@pytest.mark.parametrize("sends", [True, False])
def test_a_plan_may_ask_for_messages_or_for_none(sends: bool) -> None:
    made = compiled(plan=Plan(preset="fsdp", messages=sends))
    assert Plan.parse(made.plan).messages is sends
    assert (SENDS in helpers_of(made.sources)) == sends
    assert compiled(plan=Plan.parse(made.plan)).sources == made.sources


def test_golden(golden: Callable[..., None]) -> None:
    golden(helpers_of(compiled(plan=Plan(preset="fsdp", messages=True)).sources), ".py")


def test_where_nothing_is_gathered_no_program_sends() -> None:
    assert "messages = true" not in compiled(plan="ddp").plan


def test_one_rank_has_nobody_to_send_to() -> None:
    assert "messages" not in compiled("dp=1").plan


def test_what_is_neither_true_nor_false_is_refused() -> None:
    with pytest.raises(PlanError, match="messages = 'yes'"):
        Plan.parse('preset = "fsdp"\nmessages = "yes"')
