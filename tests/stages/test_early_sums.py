"""Sums over ranks that end a step begin in its last backward, where that leaves less at the end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import partc
from partc.machines.topology import Level, Topology
from partc.plan import Plan
from partc.plan.mesh import Mesh
from partc.program import Program
from partc.verification.verification import verify
from tests.pairs import FAST, in_pairs
from tests.pipelines import stages_of_toy, toy
from tests.zoo import Case

SLOW = 5e7  # bytes per second: a block's gradients take about as long as its backward
QUICK_S = 1e-6  # to start a transfer
BACKWARDS = "0F0,0F1,0F2,0F3,0B3,0B2,0B1,0B0\n1F0,1F1,1F2,1F3,1B3,1B2,1B1,1B0\n"


def on_slow_links(axes: str) -> Mesh:
    inside, across = (FAST, SLOW) if Mesh.of(axes).num_ranks > 2 else (SLOW, FAST)
    return in_pairs(axes, inside, across, latency_s=QUICK_S)


def compiled(case: Case, mesh: Mesh, schedule: str = "1f1b", **changed: object) -> Program:
    plan = Plan(preset="ddp").changed(schedule=schedule, **changed)
    if not schedule.endswith(".csv"):
        plan = plan.changed(microbatches=4)
    return partc.compile(case.step, mesh, plan=plan)


def test_a_stage_alone() -> None:
    """The head's gradients leave before the blocks, those of a block behind it."""
    case = toy(4)
    program = compiled(case, on_slow_links("dp=2"))
    source = program.source()
    assert "self.reduced, self.last = Reduced(), 3" in source
    assert "self.reduce([self.head_weight])" in source
    assert "self.reduce([*layer.parameters()])" in source
    verify(program, case.model, case.inputs, loss=case.loss).check()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("schedule", "tied"),
    [
        ("gpipe", False),
        ("1f1b", True),
        ("zb-h1", False),
        ("interleaved-1f1b", False),
        ("zb-v", True),
    ],
)
def test_stages(schedule: str, tied: bool) -> None:
    """Those in the middle have blocks alone, and nothing is left at their end."""
    num = 4 if schedule in ("interleaved-1f1b", "zb-v") else 2
    case = toy(2 * num, tied)
    mesh = on_slow_links("dp=2,pp=2")
    program = compiled(case, mesh, schedule, stages=stages_of_toy(num, 2 * num))
    assert any("self.reduce([*layer.parameters()])" in text for text in program.sources.values())
    verify(program, case.model, case.inputs, loss=case.loss).check()


@pytest.mark.exhaustive
@pytest.mark.parametrize(("num", "leaves"), [(2, "*layer.parameters()"), (3, "layer.")])
def test_scattered_sums(num: int, leaves: str) -> None:
    """With sharded optimizers each rank keeps its pieces; those of three ranks are cut along
    different dims, and the ones of most bytes leave early.
    """
    case = toy(4)
    levels = (Level("links", num, SLOW, QUICK_S),)
    devices = ((Topology.load("cpu").device, num),)
    mesh = replace(Mesh.of(f"dp={num}"), topology=Topology("flat", devices, levels))
    program = compiled(case, mesh, preset="zero1")
    assert f"self.reduce([{leaves}" in program.source()
    verify(program, case.model, case.inputs, loss=case.loss).check()


@pytest.mark.exhaustive
def test_the_last_microbatch_is_the_schedules(tmp_path: Path) -> None:
    path = tmp_path / "backwards.csv"
    path.write_text(BACKWARDS)
    case = toy(4)
    mesh = on_slow_links("dp=2,pp=2")
    program = compiled(case, mesh, str(path), stages=stages_of_toy(2, 4))
    assert "self.reduced, self.last = Reduced(), 0" in program.source()
    verify(program, case.model, case.inputs, loss=case.loss).check()


def test_where_transfers_are_fast_few_are_better() -> None:
    """Starting one for every block takes longer than what it hides."""
    case = toy(4)
    program = compiled(case, in_pairs("dp=2", 1e12, 1e12, 1e-3))
    assert "self.reduce(" not in program.source()


@pytest.mark.exhaustive
def test_less_is_left_at_the_end_and_less_memory_is_held() -> None:
    case = toy(8)
    mesh = on_slow_links("dp=2")
    early = compiled(case, mesh)
    late = compiled(case, in_pairs("dp=2", SLOW, FAST, 1.0))  # a start takes a second
    assert "self.reduce(" in early.source()
    assert "self.reduce(" not in late.source()
    peaks = [program.cost.as_json()["ranks"][0]["peak_bytes"] for program in (early, late)]
    assert peaks[0] <= peaks[1]
