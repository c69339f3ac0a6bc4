"""A block's gradients leave in parts where the last ones would be late."""

from __future__ import annotations

from dataclasses import replace

import pytest

from partc.api import compile
from partc.machines.topology import Topology
from partc.plan import Plan
from partc.plan.mesh import Mesh
from partc.program import Program
from partc.verification.verification import verify
from tests.overlap.words import IDS, LAYERS, model


def compiled(
    plan: str, bytes_per_s: float, latency_s: float = 1e-6, parts: dict[str, int] | None = None
) -> Program:
    machine = Topology.load("cpu")
    (level,) = machine.levels
    links = replace(level, bytes_per_s=bytes_per_s, latency_s=latency_s)
    hardware = replace(without_copies(machine), levels=(links,), start_s=0.0)
    mesh = Mesh((("dp", 2),), hardware)
    asked = Plan(preset=plan, grad_parts=parts)
    return compile(model(), mesh, (IDS,), loss=lambda m, x: m(x), plan=asked)


def without_copies(machine: Topology) -> Topology:
    """The machine with so fast a memory that what can be joined is."""
    return replace(
        machine,
        groups=tuple((replace(d, memory_bytes_per_s=1e14), num) for d, num in machine.groups),
    )


def reductions(program: Program) -> int:
    """How many of a block's, in all blocks."""
    traffic = {each["kind"]: each["count"] for each in program.cost.as_json()["traffic"]}
    return int(sum(traffic.get(kind, 0) for kind in ("all_reduce", "reduce_scatter")) // LAYERS)


def seconds(program: Program) -> float:
    found: float = program.cost.as_json()["prediction"]["seconds"]
    return found


@pytest.mark.parametrize("plan", ["ddp", "fsdp"])
def test_parts_where_they_end_the_step_earlier(plan: str) -> None:
    """Not where a bucket takes no time, nor where the network is never done with the one before."""
    made = compiled(plan, 1e9)
    assert reductions(made) > 1
    assert reductions(compiled(plan, 1e12)) == reductions(compiled(plan, 1e6, 1e-3)) == 1
    verify(made, model(), (IDS,), lambda m, x: m(x)).check()
    whole = compiled(plan, 1e9, parts={"dp": 1})
    assert reductions(whole) == 1
    assert seconds(whole) > seconds(made)
