"""Where a fleet has two kinds of devices, each pipeline stage is cut, timed and held to its own."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import partc
from partc.cost.memory_limit import memory_limits, usable
from partc.errors import MemoryLimitError
from partc.graph import Graph
from partc.lowering import begin, staged_plan, table
from partc.machines.topology import Topology
from partc.machines.what_if import Change
from partc.passes.search.plans.choose_plan import choose_plan
from partc.passes.search.plans.search_plans import Ranked
from partc.plan import Plan
from partc.plan.mesh import Mesh
from partc.program import Program
from partc.reports.other_machines import pipeline_step
from partc.reports.pipeline_cost import PipelineCost
from tests.llamas import llama, loss_of, tokens, traced

FAST = Topology.load("dgx-h100", 8)
SLOW = Topology.load("dgx-a100", 8)
SMALL = 440_000_000  # bytes of memory
pytestmark = pytest.mark.usefixtures("laws_once")


def fleet(*topologies: Topology, **of_the_last: Any) -> Topology:
    """Four devices of each, in one machine; ``of_the_last``: how its devices differ."""
    devices = [topology.device for topology in topologies]
    devices[-1] = replace(devices[-1], **of_the_last)
    return replace(FAST, groups=tuple((device, 4) for device in devices))


@cache
def step() -> partc.Traced:
    """A Llama of eight layers, and 64 sequences."""
    return partc.Traced(llama(layers=8, width=1024, vocab=1000), (tokens(64),), loss_of)


@cache
def compiled(*kinds: Topology, axes: str = "pp=2,dp=4", stages: tuple[str, ...] = ()) -> Program:
    mesh = Mesh(Mesh.parse(axes).axes, fleet(*kinds))
    return partc.compile(step(), mesh, plan="ddp", microbatches=8, stages=stages or None)


def layers(program: Program) -> int:
    """How many of the eight layers the first stage has."""
    return numbers(Plan.parse(program.plan).stages)[0]


def told(program: Program) -> dict[str, Any]:
    """Its costs."""
    return dict(program.cost.as_json())


def seconds(program: Program) -> float:
    return float(told(program)["prediction"]["seconds"])


@pytest.mark.exhaustive
def test_each_stage_is_as_long_as_its_devices_are_fast() -> None:
    mixed, alike = compiled(FAST, SLOW), compiled(FAST, FAST)
    assert layers(mixed) > layers(alike)
    stages = PipelineCost.of_json(told(mixed)).stages
    first, second = (stage.forward_s + stage.backward_s for stage in stages)
    assert abs(first - second) < second / (8 - layers(mixed))  # one layer of the slow ones


@pytest.mark.exhaustive
def test_a_step_takes_what_its_stages_take_on_their_devices(tmp_path: Path) -> None:
    mixed, all_fast, all_slow = compiled(FAST, SLOW), compiled(FAST, FAST), compiled(SLOW, SLOW)
    assert seconds(all_fast) < seconds(mixed) < seconds(all_slow)
    even = compiled(FAST, SLOW, stages=Plan.parse(all_slow.plan).stages)
    assert seconds(mixed) < seconds(even)
    assert seconds(even) == pytest.approx(seconds(all_slow), rel=0.1)  # the slow stage rules
    assert told(mixed)["device"] == f"dgx-h100: {FAST.device.name} and {SLOW.device.name}"
    mixed.save(tmp_path / "build")
    again = pipeline_step(partc.load(tmp_path / "build"), Change(), "here")
    assert again.cost.prediction.seconds == pytest.approx(seconds(mixed), rel=1e-9)


@pytest.mark.exhaustive
def test_ranks_that_work_with_all_are_as_fast_as_the_slowest() -> None:
    both, slow = (compiled(kind, SLOW, axes="dp=8") for kind in (FAST, SLOW))
    assert seconds(both) == pytest.approx(seconds(slow), rel=1e-9)


@pytest.mark.exhaustive
def test_memory_is_that_of_each_stages_devices() -> None:
    graph = step().graph(fold=True)
    free = cut(graph, fleet(FAST, SLOW))
    tight = cut(graph, fleet(FAST, SLOW, memory_bytes=SMALL))
    assert len(tight) == len(free) == 1
    assert numbers(tight) > numbers(free)  # the small devices get less
    mesh = Mesh(Mesh.parse("pp=2,dp=4").axes, fleet(FAST, SLOW, memory_bytes=SMALL))
    assert memory_limits(mesh, 0) == [usable(FAST.device.memory_bytes), usable(SMALL)]
    assert memory_limits(mesh, 2 * SMALL) == [2 * SMALL, usable(SMALL)]
    with pytest.raises(MemoryLimitError, match="pipeline rank 1"):
        partc.compile(step(), mesh, plan="ddp", microbatches=8, stages=free)


def cut(graph: Graph, topology: Topology) -> tuple[str, ...]:
    """Where the second stage begins."""
    graph.mesh = Mesh(Mesh.parse("pp=2,dp=4").axes, topology)
    return staged_plan(begin(graph, Plan(preset="ddp", microbatches=8))).plan.stages


def numbers(stages: tuple[str, ...]) -> list[int]:
    return [int(stage.rpartition(".")[2]) for stage in stages]


@pytest.mark.exhaustive
def test_a_search_uses_what_is_faster() -> None:
    graph, plan = traced(llama(layers=8, width=2048), 64), Plan(preset="auto")

    def best(*kinds: Topology) -> Ranked:
        return choose_plan(graph, Mesh((), fleet(*kinds)), plan, table()).ranked[0]

    mixed = best(FAST, SLOW)
    assert mixed.estimate.step_s < best(SLOW, SLOW).estimate.step_s
    assert mixed.candidate.pp > 1
