"""Predicted steps: phases sum up, waits are exposed where they are, folds and rates change nothing
but what they should.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from partc.api import compile
from partc.cli.main import main
from partc.cost.prediction import OPTIMIZER_TRAFFIC, Prediction, Work, predict
from partc.cost.step_walk import phase_times
from partc.cost.storage import replay
from partc.given_plan import read_plan
from partc.graph import Graph, collectives
from partc.lowering import partition
from partc.machines.devices import Device
from partc.machines.topology import Level, Topology
from partc.plan.mesh import Mesh
from partc.plan.sharding import U
from partc.reports.pipeline_cost import PipelineCost
from tests.build import Build, aten, mlp
from tests.deep import deep

# a second per FLOP, per byte of memory, per byte of a link; nothing else costs
UNIT = Device("unit", 10**9, 1.0, {"f32": 1.0}, 1e-9, 1.0)


def machine(num: int, contention: float = 0.0, bytes_per_s: float = 1.0) -> Topology:
    level = Level("wire", num, bytes_per_s, 1e-9)
    return Topology("toy", ((UNIT, num),), (level,), contention=contention)


def overlapped() -> Graph:
    """A sum over tp, started before a product that does not need it: 128 s beside 1024 s."""
    b = Build("tp=2")
    x, w = b.tensor("input", "x", [8, 8]), b.tensor("param", "w", [8, 8])
    started = b.collective(collectives.all_reduce, b(aten.add.Tensor, x, x, tp=U), "tp")
    product = b(aten.mm.default, x, w)
    y = b(collectives.wait, started)
    return b.done(results={"y": b(aten.add.Tensor, product, y)})


def test_what_runs_beside_computing_is_hidden_and_costs_its_contention() -> None:
    graph, mesh = overlapped(), Mesh.of("tp=2")
    product, moved = 1024.0, 256.0
    seconds = []
    for contention in (0.0, 0.25, 1.0):
        over = replace(mesh, topology=machine(2, contention))
        spent = phase_times(graph, replay(graph), over)["F"]
        assert spent.exposed.get("tp", 0.0) == pytest.approx(contention * moved)
        assert spent.hidden["tp"] == pytest.approx((1 - contention) * moved)
        seconds.append(spent.seconds)
    assert seconds[1] - seconds[0] == pytest.approx(moved / 4)
    assert seconds[2] - seconds[0] == pytest.approx(moved)
    assert seconds[0] > product


def test_what_is_waited_for_at_once_is_exposed() -> None:
    graph = mlp()
    slow = replace(graph.mesh, topology=machine(4, bytes_per_s=1e-3))
    for phase, spent in phase_times(graph, replay(graph), slow).items():
        assert sum(spent.exposed.values()) > 0.9 * spent.seconds, phase
        assert spent.bound in ("dp", "tp")


@cache
def local(name: str, mesh: str, plan: str, fold: bool) -> tuple[Graph, Work]:
    graph = deep(name).step.graph(fold=fold)
    work = Work.of(graph)
    graph.mesh = Mesh.of(mesh)
    return partition(graph, read_plan(plan))[1], work


CASES = [
    ("gpt2", "dp=2", "fsdp"),
    ("llama", "dp=2,tp=2", "fsdp+megatron"),
    ("llama", "dp=2", "ddp"),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "mesh", "plan"), CASES)
def test_a_folded_graph_predicts_what_the_whole_one_does(name: str, mesh: str, plan: str) -> None:
    for machine_name in ("cpu", "dgx-h100"):
        over = Mesh.of(mesh)
        over = replace(over, topology=Topology.load(machine_name, over.num_ranks))
        steps = []
        for fold in (False, True):
            graph, work = local(name, mesh, plan, fold)
            steps.append(predict(graph, replay(graph), work, over))
        whole, folded = steps
        assert folded.seconds == pytest.approx(whole.seconds, rel=0.01)
        assert folded.work == whole.work
        assert folded.device_flops == whole.device_flops
        for a, b in zip(folded.phases, whole.phases, strict=True):
            assert (a.name, a.bound) == (b.name, b.bound)
            assert a.seconds == pytest.approx(b.seconds, rel=0.01)


@pytest.mark.exhaustive
def test_faster_machines_take_no_longer() -> None:
    graph, work = local("llama", "dp=2,tp=2", "fsdp+megatron", True)
    base = Topology.load("dgx-h100", 4)
    (device, count), level = base.groups[0], base.levels[0]
    faster_device = replace(
        device,
        flops_per_s={dtype: 2 * peak for dtype, peak in device.flops_per_s.items()},
        memory_bytes_per_s=2 * device.memory_bytes_per_s,
        launch_s=device.launch_s / 2,
    )
    links = (replace(level, bytes_per_s=2 * level.bytes_per_s), *base.levels[1:])
    ran = replay(graph)

    def step(topology: Topology) -> Prediction:
        return predict(graph, ran, work, Mesh(Mesh.of("dp=2,tp=2").axes, topology))

    slow = step(base)
    by_device = step(replace(base, groups=((faster_device, count),)))
    assert by_device.seconds < slow.seconds
    assert by_device.compute_s == pytest.approx(slow.compute_s / 2, rel=0.05)
    assert step(replace(base, levels=links)).seconds < slow.seconds
    assert step(replace(base, contention=0.5)).seconds > slow.seconds


@pytest.mark.exhaustive
def test_phases_and_rates_fit_together() -> None:
    graph, work = local("gpt2", "dp=2", "fsdp", False)
    step = predict(graph, replay(graph), work, Mesh.of("dp=2"))
    assert sum(phase.seconds for phase in step.phases) == pytest.approx(step.seconds)
    exposed = sum(each.exposed_s for each in step.axes)
    assert step.compute_s + exposed == pytest.approx(step.seconds)
    assert [phase.name for phase in step.phases] == [
        "forward", "backward", "gradients", "optimizer"
    ]  # fmt: skip
    assert step.samples_per_s == pytest.approx(work.samples / step.seconds)
    assert step.tokens_per_s / step.samples_per_s == pytest.approx(work.tokens / work.samples)
    assert 0 < step.model_share <= step.hardware_share < 1
    assert Prediction.of_json(json.loads(json.dumps(step.as_json()))) == step


def test_an_optimizer_moves_its_states_at_the_memory_s_speed() -> None:
    graph, work = local("gpt2", "dp=2", "ddp", False)
    trained = sum(node.meta["val"].nbytes for node in graph.grads.values())
    took = {}
    for optimizer in ("sgd", "adamw"):
        step = predict(graph, replay(graph), work, Mesh.of("dp=2"), optimizer=optimizer)
        took[optimizer] = next(p.seconds for p in step.phases if p.name == "optimizer")
    bandwidth = Topology.load("cpu").device.memory_bytes_per_s
    assert took["adamw"] == pytest.approx(7 * trained / bandwidth)
    assert took["sgd"] / took["adamw"] == pytest.approx(3 / OPTIMIZER_TRAFFIC["adamw"])


@pytest.mark.exhaustive
def test_a_pipeline_s_prediction_is_its_simulated_step_and_the_optimizer() -> None:
    program = compile(deep("llama").step, "pp=2", plan="ddp", microbatches=2, schedule="1f1b")
    assert isinstance(program.cost, PipelineCost)
    step = program.cost.prediction
    phases = {phase.name: phase.seconds for phase in step.phases}
    assert sum(phases.values()) == pytest.approx(step.seconds)
    begins = {s.spent["S"].seconds for s in program.cost.stages if "S" in s.spent}  # once, before
    simulated = step.seconds - phases["optimizer"] - program.cost.step_s
    assert any(simulated == pytest.approx(seconds) for seconds in (0.0, *sorted(begins)))
    assert phases["waiting"] > 0
    assert "predicted step" in str(program.cost)


@pytest.mark.exhaustive
def test_simulate_shows_the_step_of_one_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = compile(deep("gpt2").step, "dp=2", plan="fsdp")
    program.save(tmp_path / "b")
    assert main(["simulate", str(tmp_path / "b")]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("  predicted step")
    assert shown.rstrip() in str(program.cost)
    assert main(["simulate", str(tmp_path / "b"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == program.cost.as_json()["prediction"]
