"""``plan="auto"`` finds what an expert would write, for the reasons that an expert would give."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import partc
from benchmarks.joint_shardings import search_shardings
from partc.errors import PlanError
from partc.graph import Graph
from partc.lowering import table, trace
from partc.machines.topology import Topology
from partc.passes.search.plans.candidate import Candidate
from partc.passes.search.plans.choose_plan import Choice, choose_plan
from partc.plan.mesh import Mesh
from partc.reports.cost import CostReport
from partc.schedules import NAMES
from tests.llamas import AUTO, llama, loss_of, tokens, traced

pytestmark = pytest.mark.usefixtures("laws_once")


@pytest.fixture(scope="module")
def small() -> Graph:
    """Half a billion parameters, 256 sequences."""
    return traced(llama(layers=6, width=2048), 256)


@pytest.fixture(scope="module")
def large() -> Graph:
    """Seven billion parameters, 32 sequences."""
    return traced(llama(layers=32, width=4096), 32)


@pytest.fixture(scope="module")
def many() -> Graph:
    """Seven billion parameters, 128 sequences."""
    return traced(llama(layers=32, width=4096), 128)


def best(graph: Graph, machine: str, devices: int, **plan: Any) -> Choice:
    return choose_plan(graph, Mesh.load(machine, devices), AUTO.changed(**plan), table())


@pytest.mark.exhaustive
def test_what_fits_is_replicated(small: Graph) -> None:
    one = best(small, "dgx-h100", 8).ranked[0].candidate
    assert (one.tp, one.pp, one.microbatches) == (1, 1, 1)
    assert one.data in ("ddp", "zero1")


@pytest.mark.exhaustive
def test_parameters_are_sharded_where_they_do_not_fit(large: Graph) -> None:
    one = best(large, "dgx-h100", 8, memory_bytes=40_000_000_000).ranked[0].candidate
    assert one.data in ("fsdp", "zero1")
    assert one.pp == 1


@pytest.mark.exhaustive
def test_the_slower_the_links_between_machines_the_less_they_carry(many: Graph) -> None:
    """Replicas add up what each machine shards (HSDP), then pipelines pass on activations."""
    fast, slow = (slower(many, times) for times in (1, 4))
    assert (fast.replicate, fast.shard, fast.tp, fast.pp) == (4, 8, 1, 1)
    assert slow.pp == 4  # as many as machines
    assert slow.shard * slow.tp == 8


def slower(graph: Graph, times: int) -> Candidate:
    """The best for four machines of eight devices whose links to each other are so much slower."""
    topology = Topology.load("p4d-ethernet", 32)
    inner, outer = topology.levels
    outer = replace(outer, bytes_per_s=outer.bytes_per_s / times)
    mesh = Mesh((), replace(topology, levels=(inner, outer)))
    found = choose_plan(graph, mesh, AUTO.changed(memory_bytes=42_000_000_000), table())
    return found.ranked[0].candidate


@pytest.mark.exhaustive
def test_one_device_takes_turns_and_recomputes_as_its_memory_asks(small: Graph) -> None:
    least = best(small, "dgx-h100", 1, memory_bytes=1 << 40).ranked[0].estimate.peak_bytes
    found = [
        best(small, "dgx-h100", 1, memory_bytes=round(part * least)).ranked[0].candidate
        for part in (1.1, 0.3, 0.03)
    ]
    turns = [one.microbatches for one in found]
    assert turns[0] == 1 < turns[1] < turns[2]
    assert str(found[0]) == "ddp on one device"


def test_slow_links_between_machines_carry_pipelines(large: Graph) -> None:
    one = best(large, "p4d-ethernet", 128).ranked[0].candidate
    assert one.tp == 8  # all of a machine
    assert one.word == "megatron-sp"
    assert one.pp > 1


@pytest.mark.exhaustive
def test_columns_then_rows_and_sequences_in_between() -> None:
    """Shoeybi et al. 2019 (arXiv 1909.08053), Korthikanti et al. 2022 (arXiv 2205.05198)."""
    graph = trace(llama(layers=2), (tokens(1),), loss_of, fold=True)
    found = search_shardings(graph, Mesh((("tp", 8),), Mesh.load("dgx-h100", 8).topology))
    layer = {
        name.split(".")[-2]: str(cuts.get("tp", "whole"))
        for name, cuts in found.plan.params.items()
        if "layers" in name and "norm" not in name
    }
    columns = dict.fromkeys(["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"], "cut 0")
    assert layer == columns | {"o_proj": "cut 1", "down_proj": "cut 1"}
    assert found.plan.scatter == {"tp": 1}
    assert found.gap == 0


@pytest.mark.exhaustive
def test_few_samples_on_many_devices_cut_tensors_inside_a_machine(large: Graph) -> None:
    one = best(large, "dgx-h100", 128).ranked[0].candidate
    assert one.tp in (2, 4, 8)  # data ranks cannot be more than samples
    assert one.word == "megatron-sp"


@pytest.mark.exhaustive
def test_bounds_leave_out_nothing_better(large: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    found = best(large, "dgx-h100", 16)
    monkeypatch.setattr("partc.passes.search.plans.choose_plan.KEPT", 10**6)
    every = best(large, "dgx-h100", 16)
    assert len(every.ranked) > 100
    assert every.ranked[: len(found.ranked)] == found.ranked


def test_pins_stay(large: Graph) -> None:
    mesh = Mesh((("dp", 4), ("tp", 2)), Mesh.load("dgx-h100", 8).topology)
    found = choose_plan(large, mesh, AUTO.changed(microbatches=2), table())
    assert {r.candidate.microbatches for r in found.ranked} == {2}
    assert {str(r.candidate.mesh(None)) for r in found.ranked} == {"dp=4 tp=2"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", sorted({*NAMES} - {"forward-only"}))
def test_any_schedule_can_be_pinned(large: Graph, schedule: str) -> None:
    mesh = Mesh((("pp", 4), ("dp", 2)), Mesh.load("dgx-h100", 8).topology)
    found = choose_plan(large, mesh, AUTO.changed(schedule=schedule), table())
    assert {each.candidate.schedule for each in found.ranked} == {schedule}
    _, plan = found.ways(large, mesh, AUTO.changed(schedule=schedule))[0]
    least, most = NAMES[schedule].chunks
    assert least <= plan.virtual_stages <= (most or plan.virtual_stages)


def test_a_schedule_that_nobody_knows_is_named(large: Graph) -> None:
    with pytest.raises(PlanError, match="'2f2b': no such schedule"):
        choose_plan(large, Mesh((("pp", 2),)), AUTO.changed(schedule="2f2b"), table())


@pytest.mark.exhaustive
def test_nothing_fits_says_what_comes_nearest(large: Graph) -> None:
    with pytest.raises(PlanError, match=r"the least is [\d.]+ GB: ") as error:
        best(large, "dgx-h100", 8, memory_bytes=3_000_000_000)
    assert "more devices" in str(error.value)


@pytest.mark.exhaustive
def test_the_program_needs_what_was_estimated() -> None:
    step = partc.Traced(llama(layers=3, width=2048), (tokens(64),), loss_of)
    mesh = Mesh.load("dgx-h100", 8)
    program = partc.compile(step, mesh)
    taken, cost = program.basis.taken, program.cost
    assert taken is not None
    assert isinstance(cost, CostReport)
    estimate = taken.search.estimate(taken.candidate).estimate
    assert cost.peak_bytes == pytest.approx(estimate.peak_bytes, rel=0.1)
    again = partc.compile(step, mesh, plan=program.plan)
    assert (again.plan, again.sources) == (program.plan, program.sources)


@pytest.mark.exhaustive
def test_batch_norms_are_not_given_microbatches_that_nobody_asked_for() -> None:
    """In microbatches they would compute something else than the model does."""
    blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)) for _ in range(2)]
    model = nn.Sequential(nn.Conv2d(3, 8, 1), *blocks, nn.Flatten(), nn.Linear(128, 4))
    x, y = torch.randn(16, 3, 4, 4), torch.randint(4, (16,))
    step = partc.Traced(model, (x, y), lambda m, x, y: nn.functional.cross_entropy(m(x), y))
    program = partc.compile(step, "pp=2")
    assert "microbatches = 1\n" in program.plan
    assert 'batch_norm = "global"' in program.plan
    with pytest.warns(UserWarning, match="microbatches=4: BatchNorm uses the statistics of each"):
        asked = partc.compile(step, "pp=2", microbatches=4)
    assert "microbatches = 4\n" in asked.plan
